"""Beam search along a catalog: the best of the few ways that its items leave go on, and what completes them ends."""

from __future__ import annotations

import torch

from vllm_trie.search.beams import Beams, States
from vllm_trie.search.constraints.catalog import AlongItems, Outcomes, log_probabilities_of
from vllm_trie.search.devices import NEVER, sees
from vllm_trie.search.filters import filtered, pruned
from vllm_trie.search.rank import Candidates, rank_candidates
from vllm_trie.search.rules import SelectRules
from vllm_trie.search.step_result import Step
from vllm_trie.search.strategies.means import Choice, Means, going_on


def best_of_items(
    rules: SelectRules,
    logprobs: torch.Tensor,
    beams: Beams,
    means: Means,
) -> Choice:
    """The best ways along a catalog become beams, and those among the best b that complete their items finish.

    A way may do both, where an item is the beginning of another: so what finishes and what goes on are ranked
    apart. Rows have a few children each, which are ranked like a vocabulary of that size.
    """
    (num_rows, vocab_size), width, scores = logprobs.shape[1:], rules.num_beams or rules.width, beams.scores
    items = next(constraint for constraint in beams.states if isinstance(constraint, AlongItems))
    ways = items.ways(beams.states[items], vocab_size, beams.length)
    of_ways = log_probabilities_of(beams.narrow(logprobs, items), ways, items.rules.renormalizes)
    allowed = pruned(filtered(of_ways, rules.filters, width), scores, rules.pruning)

    def outcomes(candidates: Candidates[torch.Tensor]) -> Outcomes:
        return items.outcomes(ways.targets.flatten(1).gather(1, candidates.tokens))

    tokens = ways.tokens.flatten(1)
    over = live = _best_ways(allowed, scores, width)
    of_over = of_live = outcomes(over)
    if not (sees(scores.device) and bool((of_over.goes_on | (over.scores == NEVER)).all())):
        leads_on = items.outcomes(ways.targets).goes_on
        live = _best_ways(allowed.where(leads_on, NEVER), scores, width)
        of_live = outcomes(live)
    ends = (of_over.is_complete if rules.is_last else of_over.ends) & (not rules.stops.are_barred)
    finished = over._replace(tokens=tokens.gather(1, over.tokens), scores=over.scores.where(ends, NEVER))
    by_slot = means.select_next(live, going_on(rules, live, ~of_live.goes_on), rules.width, num_rows)
    states: States = {items: outcomes(by_slot).states}
    by_slot = by_slot._replace(tokens=tokens.gather(1, by_slot.tokens))
    return Choice(Step(*by_slot, finished, states=states), logprobs)


def _best_ways(allowed: torch.Tensor, scores: torch.Tensor, count: int) -> Candidates[torch.Tensor]:
    """The best `count` of ways [G, r, B]; in `tokens` stand their places among all of a group."""
    ranked = rank_candidates(allowed, scores, count)
    return ranked._replace(tokens=ranked.parents * allowed.shape[-1] + ranked.tokens)
