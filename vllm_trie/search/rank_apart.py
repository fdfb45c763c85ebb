"""Ranks what goes on and what ends separately, so a step's cost does not depend on the number of stop tokens."""

from __future__ import annotations

import torch

from vllm_trie.search.constraints.stops import StopConstraints
from vllm_trie.search.rank import (
    SearchCandidates,
    SearchRankingLimits,
    rank_search_candidates,
    search_candidates_in_order,
)


def rank_search_ends_apart(
    logprobs: torch.Tensor, scores: torch.Tensor, counts: tuple[int, int], stops: StopConstraints
) -> SearchCandidates[torch.Tensor]:
    """The best continuations of each group that go on, and the best that end in a stop token, merged in rank order.

    Args:
        logprobs, scores: As for `rank_search_candidates`.
        counts: How many that go on, and how many that end.
        stops: The stop tokens.
    """
    ranked = []
    for count, ends in zip(counts, (False, True), strict=True):
        among = SearchRankingLimits(stops.biases(logprobs.shape[-1], logprobs.device, ends=ends))
        ranked.append(rank_search_candidates(logprobs, scores, count, among))
    return search_candidates_in_order(SearchCandidates.join(ranked), logprobs.shape[-1])
