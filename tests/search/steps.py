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
from vllm_trie.search.rules import SelectRules
from vllm_trie.search.step import take_step
from vllm_trie.search.step_result import Step, packed, unpacked
from vllm_trie.search.stopping import HypothesisPool


@contextmanager
def shortcuts(allowed: bool) -> Iterator[None]:
    """Within it, the search looks at tensors to save work, as on a CPU, or it does not."""
    with ExitStack() as stack:
        for module in (filters, catalog, grammar, slots, step):
            stack.enter_context(patch.object(module, "sees", lambda _: allowed))
        yield


def offer(pool: HypothesisPool, total: float, length: int, last_token: int, node: int) -> int | None:
    """One hypothesis. Returns the node that has no place in the pool (any more), if any."""
    outdone = pool.add([total], length, [last_token], [node])
    return outdone[0].node if outdone else None


def rules_of(width: int, semantics: str = "hf", stops: tuple[int, ...] = (), **others: Any) -> SelectRules:
    """Rules of a search that asks for nothing but what is said."""
    defaults = {"stop_strings": (), "skip_special_tokens": True, "num_logprobs": None, "is_controlled": False}
    return SelectRules(width=width, semantics=semantics, stop_token_ids=stops, **(defaults | others))


def steps_of(
    rules: SelectRules, logits: torch.Tensor, scores: torch.Tensor, *under: tuple[Constraint, torch.Tensor], **how: Any
) -> list[Step]:
    """The step of each group, on the host; `under`: constraints, with the states of rows."""
    tensor, layout = packed(take_step(rules, logits, Beams(scores, states=dict(under)), **how))
    return unpacked(tensor.numpy(), layout)
