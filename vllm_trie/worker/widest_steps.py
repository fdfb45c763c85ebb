"""The steps of the search that take most memory, for vLLM to see while it measures what is left for the KV cache."""

from __future__ import annotations

import torch

from vllm_trie.search.beams import Beams
from vllm_trie.search.constraints.catalog import ItemRules, ItemTrie
from vllm_trie.search.constraints.constraint import Constraint
from vllm_trie.search.constraints.stops import Stops
from vllm_trie.search.filters import LogitsFilters, Pruning
from vllm_trie.search.rules import Means, SelectRules, Strategy
from vllm_trie.search.step import take_step
from vllm_trie.search.step_result import packed
from vllm_trie.search.strategies.best import Best
from vllm_trie.search.strategies.drawn import Drawn
from vllm_trie.search.strategies.in_groups import InGroups
from vllm_trie.search.strategies.sampled import SampledEach
from vllm_trie.search.strategies.stochastic import Stochastic

STRATEGIES: tuple[Strategy, ...] = (
    *(Best(), InGroups(1, 0.5, None), SampledEach(), Stochastic()),
    *(Drawn(replacement, 1, None, False) for replacement in (False, True)),
)
FILTERS, PRUNING, STOPS = LogitsFilters(0.5, 0.1, 0, 0.9), Pruning(0.1, 1.0, 0.1, 2), Stops((0,))
TRIE_TYPES = torch.int32, torch.int32, torch.bool  # of its children, tokens and ends


def take_widest_steps(logits: torch.Tensor, num_logprobs: int, has_catalogs: bool) -> None:
    """Take a step of each kind, of one search with as many beams as there are rows, and with all that it may ask for.

    Args:
        logits: [R, V], of all rows.
        num_logprobs: The most that each row may have to report; -1: all.
        has_catalogs: Whether searches may go along catalogs.
    """
    num_rows, device = len(logits), logits.device
    for strategy in STRATEGIES:
        _take(SelectRules(num_rows, strategy, STOPS, num_logprobs, True, FILTERS, PRUNING), logits, {})
    if has_catalogs:
        rules = ItemRules("", after=0)
        first_child, tokens, is_item = (torch.zeros(2, dtype=dtype, device=device) for dtype in TRIE_TYPES)
        trie = ItemTrie(first_child, tokens, is_item, [1])
        along = rules.on({"": trie}, STOPS.token_ids)
        under: dict[Constraint, torch.Tensor] = {along: along.begin(num_rows, device)}
        _take(SelectRules(num_rows, Best(), STOPS, num_logprobs, True, FILTERS, PRUNING, (rules,)), logits, under)


def _take(rules: SelectRules, logits: torch.Tensor, under: dict[Constraint, torch.Tensor]) -> None:
    beams = Beams(torch.zeros(1, rules.width, device=logits.device), states=under)
    packed(take_step(rules, logits.float()[None], beams, Means([(0, 0)])))  # as they are once they are processed
