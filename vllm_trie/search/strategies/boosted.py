"""Any strategy, by scores to which constraints add: hypotheses keep their cumulative log-probabilities besides."""

from __future__ import annotations

from functools import reduce
from operator import add

import torch

from vllm_trie.search.beams import Beams
from vllm_trie.search.devices import NEVER
from vllm_trie.search.parts import in_parts
from vllm_trie.search.rank import Candidates
from vllm_trie.search.rules import Choice, Means, SelectRules
from vllm_trie.search.step_result import RankScores


def choose_boosted(
    rules: SelectRules, logprobs: torch.Tensor, beams: Beams, means: Means, boosts: torch.Tensor, at_end: torch.Tensor
) -> Choice:
    """As the strategy does, but candidates compete by cumulative log-probability and boosts; reports are without these.

    Args:
        rules, logprobs, beams, means: As for `Strategy.choose`.
        boosts: [G, r, V] float32, what each token adds.
        at_end: [G, r, V] float32, what it adds to a hypothesis that ends with it.
    """
    before = beams.compete_by.where(beams.scores > NEVER, NEVER)
    (best,) = in_parts(logprobs.shape, lambda own, boosts: ((own + boosts).amax(dim=-1),), logprobs, boosts)
    excess = (best + before).amax(dim=-1, keepdim=True).clamp(min=0)  # strategies rank scores of at most 0
    ranked = beams._replace(scores=before - excess)
    step, _ = rules.strategy.choose(rules, logprobs, ranked, means._replace(boosts=boosts))
    by_slot = Candidates(*step[:3])
    sums = [_total(beams.scores, candidates, logprobs) for candidates in (by_slot, step.finished)]
    after = RankScores(_total(before, by_slot, logprobs, boosts), _total(before, step.finished, logprobs, at_end))
    finished = step.finished._replace(scores=sums[1])
    return Choice(step._replace(scores=sums[0], finished=finished, rank_scores=after), logprobs)


def _total(scores: torch.Tensor, candidates: Candidates[torch.Tensor], *values: torch.Tensor) -> torch.Tensor:
    """[G, K] what candidates have of their rows, and of their tokens in all values; -inf where there is none."""
    parents, tokens, ranked = candidates
    cells = parents * values[0].shape[-1] + tokens
    own = reduce(add, (of_tokens.flatten(1).gather(1, cells) for of_tokens in values))
    return torch.where(ranked > NEVER, own + scores.gather(1, parents), NEVER)
