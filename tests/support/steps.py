"""Steps of the search on the host, with and without shortcuts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from vllm_trie.search import filters, slots, step
from vllm_trie.search.beams import Beams
from vllm_trie.search.constraints import catalog, grammar
from vllm_trie.search.constraints.constraint import Constraint
from vllm_trie.search.constraints.stops import Stops
from vllm_trie.search.rules import Means, SelectRules
from vllm_trie.search.step import PLAIN, take_step
from vllm_trie.search.step_result import Step, packed, unpacked
from vllm_trie.search.stopping import Ended, HypothesisPool
from vllm_trie.search.strategies import best_continuations
from vllm_trie.search.strategies.best import Best


@contextmanager
def shortcuts(allowed: bool) -> Iterator[None]:
    """Within it, the search looks at tensors to save work, as on a CPU, or it does not."""
    with ExitStack() as stack:
        for module in (best_continuations, filters, catalog, grammar, slots, step):
            stack.enter_context(patch.object(module, "sees", lambda _: allowed))
        yield


def offer(pool: HypothesisPool, total: float, length: int, last_token: int, leaf: int) -> int | None:
    """One hypothesis. Returns the leaf that has no place in the pool (any more), if any."""
    outdone = pool.add(Ended.of([total], [last_token], [leaf], [0]), length)
    return int(outdone[0]) if len(outdone) else None


def rules_of(
    width: int, semantics: str = "hf", stops: tuple[int, ...] = (), are_barred: bool = False, **others: Any
) -> SelectRules:
    """Rules of a search that asks for nothing but what is said."""
    defaults = {"strategy": Best(semantics), "stops": Stops(stops, are_barred=are_barred)}
    return SelectRules(width, **(defaults | others))


def steps_of(
    rules: SelectRules,
    logits: torch.Tensor,
    scores: torch.Tensor,
    *under: tuple[Constraint, torch.Tensor],
    means: Means = PLAIN,
) -> list[Step]:
    """The step of each group, on the host; `under`: constraints, with the states of rows."""
    tensor, layout = packed(take_step(rules, logits, Beams(scores, states=dict(under)), means))
    return unpacked(tensor.numpy(), layout)
