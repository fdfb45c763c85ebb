"""What goes on and what ends, ranked apart: so a step costs the same however many tokens end hypotheses."""

from __future__ import annotations

import torch

from vllm_trie.search.devices import NEVER
from vllm_trie.search.rank import Candidates, in_order, rank_candidates


def rank_without(
    logprobs: torch.Tensor, scores: torch.Tensor, count: int, tokens: torch.Tensor
) -> Candidates[torch.Tensor]:
    """`rank_candidates` of all continuations but those by some tokens [n]."""
    own = logprobs.index_select(-1, tokens)
    return _rank_others(logprobs, scores, count, tokens, own)


def rank_of_tokens(
    logprobs: torch.Tensor, scores: torch.Tensor, count: int, tokens: torch.Tensor
) -> Candidates[torch.Tensor]:
    """The best `count` continuations by some tokens alone.

    Args:
        logprobs: [G, r, n] float32, of these tokens.
        tokens: [n], ascending.
    """
    ranked = rank_candidates(logprobs, scores, count)
    return ranked._replace(tokens=tokens[ranked.tokens])


def rank_apart(
    logprobs: torch.Tensor, scores: torch.Tensor, count: int, tokens: torch.Tensor, most: int
) -> Candidates[torch.Tensor]:
    """The best `count` continuations of each group, in which so many at most are by some tokens.

    Args:
        logprobs, scores: As for `rank_candidates`; changed on the way, and left as they were.
        tokens: [n], ascending.
        most: Of continuations by these tokens, the best.
    """
    own = logprobs.index_select(-1, tokens)
    by_tokens = rank_of_tokens(own, scores, most, tokens)
    count = min(count, logprobs.shape[1] * logprobs.shape[2])
    others = _rank_others(logprobs, scores, count - by_tokens.tokens.shape[1], tokens, own)
    return in_order(Candidates.join([others, by_tokens]), logprobs.shape[-1])


def _rank_others(
    logprobs: torch.Tensor, scores: torch.Tensor, count: int, tokens: torch.Tensor, own: torch.Tensor
) -> Candidates[torch.Tensor]:
    """`rank_without`; `own` [G, r, n] is put back. A second tensor of all log-probabilities would take more memory."""
    ranked = rank_candidates(logprobs.index_fill_(-1, tokens, NEVER), scores, count)
    logprobs.index_copy_(-1, tokens, own)
    return ranked
