"""Beam search where rows have few continuations, as along a catalog: the best go on, what completes the best ends."""

from __future__ import annotations

import torch

from vllm_trie.search.beams import Beams
from vllm_trie.search.constraints.constraint import Constraint, Outcomes
from vllm_trie.search.devices import NEVER, sees
from vllm_trie.search.filters import filtered, prune_
from vllm_trie.search.parts import in_parts, parts
from vllm_trie.search.rank import Candidates, rank_candidates
from vllm_trie.search.rules import Choice, Means, SelectRules, going_on
from vllm_trie.search.step_result import Step


def best_continuations(
    rules: SelectRules, logprobs: torch.Tensor, beams: Beams, means: Means, sparse: Constraint
) -> Choice:
    """The best continuations become beams, and those among the best b that are complete finish.

    One may do both, where an item is the beginning of another: so what finishes and what goes on are ranked
    apart. Rows have a few children each, which are ranked like a vocabulary of that size.

    Args:
        sparse: The constraint that lists continuations.
    """
    (num_rows, vocab_size), width, scores = logprobs.shape[1:], rules.num_beams or rules.width, beams.scores
    boosts = means.boosts if means.boosts is None else means.boosts.expand_as(logprobs)
    most = sparse.most_continuations(beams.states[sparse], vocab_size, beams.length)

    def of_rows(
        logprobs: torch.Tensor, beams: Beams, boosts: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = sparse.continuations(beams.states[sparse], most)
        own = sparse.logprobs_of(beams.narrow(logprobs, done=sparse), found)
        allowed = filtered(own, rules.filters, width if boosts is None else None)
        if boosts is not None:
            allowed = allowed + boosts.gather(-1, found.tokens)
        return allowed, found.tokens.int(), found.targets

    shape = *scores.shape, most  # a few more, where stop tokens are among them
    allowed, tokens, targets = in_parts(shape, of_rows, logprobs, beams, *([] if boosts is None else [boosts]))
    prune_(allowed, scores, rules.pruning)

    def outcomes(candidates: Candidates[torch.Tensor]) -> Outcomes:
        return sparse.outcomes(targets.flatten(1).gather(1, candidates.tokens))

    tokens = tokens.flatten(1)
    over = live = _best_places(allowed, scores, width)
    of_over = of_live = outcomes(over)
    if not (sees(scores.device) and bool((of_over.goes_on | (over.scores == NEVER)).all())):
        for rows in parts(allowed.shape):
            allowed[:, rows].masked_fill_(~sparse.go_on(targets[:, rows]), NEVER)
        live = _best_places(allowed, scores, width)
        of_live = outcomes(live)
    ends = (of_over.is_complete if rules.is_last else of_over.ends) & (not rules.stops.are_barred)
    finished = over._replace(tokens=tokens.gather(1, over.tokens).long(), scores=over.scores.where(ends, NEVER))
    by_slot = means.select_next(live, going_on(rules, live, ~of_live.goes_on), rules.width, num_rows)
    states = {sparse: outcomes(by_slot).states}
    by_slot = by_slot._replace(tokens=tokens.gather(1, by_slot.tokens).long())
    return Choice(Step(*by_slot, finished, states=states), logprobs)


def _best_places(allowed: torch.Tensor, scores: torch.Tensor, count: int) -> Candidates[torch.Tensor]:
    """The best `count` of continuations [G, r, B]; in `tokens` stand their places among all of a group."""
    ranked = rank_candidates(allowed, scores, count)
    return ranked._replace(tokens=ranked.parents * allowed.shape[-1] + ranked.tokens)
