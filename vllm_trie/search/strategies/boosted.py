"""Applies any strategy to scores with boosts; hypotheses also keep their cumulative log-probabilities."""

from __future__ import annotations

from functools import reduce
from operator import add

import torch

from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.devices import NEVER
from vllm_trie.search.parts import in_search_parts
from vllm_trie.search.rank import SearchCandidates
from vllm_trie.search.rules import SearchDecision, SearchInputs, SearchRules
from vllm_trie.search.step_result import SearchRankScores


def choose_by_boosted_strategy(
    rules: SearchRules, logprobs: torch.Tensor, beams: SearchBeams, inputs: SearchInputs, boosts: torch.Tensor
) -> SearchDecision:
    """Chooses as the strategy does, by cumulative log-probability plus boosts; reports are without boosts.

    Args:
        rules, logprobs, beams, inputs: As for `SearchStrategy.choose`.
        boosts: [G, r, V] float32, what each token adds; in the last step, to a hypothesis that ends with it.
    """
    before = beams.compete_by.where(beams.scores > NEVER, NEVER)
    # In the last step all boosts are those of ends, and no phrase continues after a stop token. Which candidates
    # complete a stop string is known only of what is ranked.
    may_pend = not (rules.is_last or rules.bar_ends)
    inputs = inputs._replace(boosts=boosts, has_pending=may_pend and rules.items is not None)

    def best_of_rows(logprobs: torch.Tensor, boosts: torch.Tensor, beams: SearchBeams) -> tuple[torch.Tensor]:
        best = (logprobs + boosts).amax(dim=-1)
        at_end = beams.boosts(logprobs, is_end=True) if inputs.has_pending else None
        return (best if at_end is None else best.maximum((logprobs + at_end).amax(dim=-1)),)

    (best,) = in_search_parts(logprobs.shape, best_of_rows, logprobs, boosts, beams)
    total = (best + before).nan_to_num_(nan=NEVER)  # a row whose logits are NaN dies alone
    excess = total.amax(dim=-1, keepdim=True).clamp(min=0)  # strategies rank scores of at most 0
    step, _ = rules.strategy.choose(rules, logprobs, beams._replace(scores=before - excess), inputs)
    by_slot, finished = SearchCandidates(*step[:3]), step.finished
    sums = [_boosted_strategy_total(beams.scores, candidates, logprobs) for candidates in (by_slot, finished)]
    of_beams, of_finished = (
        _boosted_strategy_total(before, candidates, logprobs, boosts) for candidates in (by_slot, finished)
    )
    if (
        may_pend
        and (rules.stops.strings or rules.items)
        and (pending := beams.pending(finished.parents, finished.tokens)) is not None
    ):
        of_finished = of_finished - pending
    after = SearchRankScores(of_beams, of_finished)
    return SearchDecision(
        step._replace(scores=sums[0], finished=finished._replace(scores=sums[1]), rank_scores=after), logprobs
    )


def _boosted_strategy_total(
    scores: torch.Tensor, candidates: SearchCandidates[torch.Tensor], *values: torch.Tensor
) -> torch.Tensor:
    """[G, K], the scores of candidates' rows plus the `values` of their tokens; -inf where there is no candidate."""
    parents, tokens, ranked = candidates
    cells = parents * values[0].shape[-1] + tokens
    own = reduce(add, (of_tokens.flatten(1).gather(1, cells) for of_tokens in values))
    return torch.where(ranked > NEVER, own + scores.gather(1, parents), NEVER)
