"""Steps of the search on the host, with and without shortcuts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from vllm_trie.search import filters, rank, step
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints import catalog, grammar
from vllm_trie.search.constraints.constraint import Constraint
from vllm_trie.search.constraints.stops import StopConstraints
from vllm_trie.search.rules import SearchInputs, SearchRules
from vllm_trie.search.step import PLAIN, take_packed_search_step
from vllm_trie.search.step_result import SearchStepResult, unpack_search_steps
from vllm_trie.search.stopping import EndedSearchHypotheses, SearchHypothesisPool
from vllm_trie.search.strategies import best_continuations
from vllm_trie.search.strategies.best import BestStrategy


@contextmanager
def shortcuts(allowed: bool) -> Iterator[None]:
    """Within it, the search looks at tensors to save work, as on a CPU, or it does not."""
    with ExitStack() as stack:
        for module in (best_continuations, filters, catalog, grammar, rank, step):
            stack.enter_context(patch.object(module, "is_searched_on_host", lambda _: allowed))
        yield


def offer(pool: SearchHypothesisPool, total: float, length: int, last_token: int, leaf: int) -> int | None:
    """One hypothesis. Returns the leaf that has no place in the pool (any more), if any."""
    outdone = pool.add(EndedSearchHypotheses.of([total], [last_token], [leaf], [0]), length)
    return int(outdone[0]) if len(outdone) else None


def rules_of(
    width: int, semantics: str = "hf", stops: tuple[int, ...] = (), are_barred: bool = False, **others: Any
) -> SearchRules:
    """Rules of a search that asks for nothing but what is said. Barred stops bar items, too, unless it is said."""
    defaults = {"strategy": BestStrategy(semantics), "stops": StopConstraints(stops, are_barred=are_barred)}
    rules = SearchRules(width, **(defaults | others))
    return rules._replace(bars_items=others.get("bars_items", rules.are_sparse and are_barred))


def steps_of(
    rules: SearchRules,
    logits: torch.Tensor,
    scores: torch.Tensor,
    *under: tuple[Constraint, torch.Tensor],
    inputs: SearchInputs = PLAIN,
) -> list[SearchStepResult]:
    """The step of each group, on the host; `under`: constraints, with the states of rows."""
    taken = take_packed_search_step(rules, logits, SearchBeams(scores, states=dict(under)), inputs)
    return unpack_search_steps(taken.words.numpy(), taken.layout)
