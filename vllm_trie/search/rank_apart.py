"""What goes on and what ends, ranked apart: so a step costs the same however many tokens end hypotheses."""

from __future__ import annotations

import torch

from vllm_trie.search.constraints.stops import Stops
from vllm_trie.search.rank import Among, Candidates, in_order, rank_candidates


def rank_apart(
    logprobs: torch.Tensor, scores: torch.Tensor, counts: tuple[int, int], stops: Stops
) -> Candidates[torch.Tensor]:
    """The best continuations of each group that go on, and the best that end in a stop token, in one order.

    Args:
        logprobs, scores: As for `rank_candidates`.
        counts: How many go on, and how many end.
        stops: The stop tokens.
    """
    ranked = []
    for count, ends in zip(counts, (False, True), strict=True):
        among = Among(stops.biases(logprobs.shape[-1], logprobs.device, ends=ends))
        ranked.append(rank_candidates(logprobs, scores, count, among))
    return in_order(Candidates.join(ranked), logprobs.shape[-1])
