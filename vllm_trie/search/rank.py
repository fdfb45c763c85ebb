"""Rank the continuations of many groups at once, in total order: score desc, parent asc, token asc."""

from __future__ import annotations

from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import torch

from vllm_trie.search.shortcuts import sees

Array = TypeVar("Array")  # torch.Tensor, or np.ndarray on the host

WIDE = 128  # candidates from which on few are asked of each row at first: seldom do many of the best come from one
SCORE_UNIT = 1 << 31  # of an order key; a group has fewer continuations


class Candidates(NamedTuple, Generic[Array]):
    """Continuations of each group's beams, the best first. Tensors [G, K]; on the host [K], of a single group."""

    parents: Array  # row the continuation extends
    tokens: Array
    scores: Array  # float32, cumulative log-probability; -inf where there is no such continuation


def rank_candidates(logprobs: torch.Tensor, scores: torch.Tensor, count: int) -> Candidates[torch.Tensor]:
    """The best `count` continuations of each group by cumulative log-probability; fewer if there are fewer.

    Each row gives its best, and these are merged. Equal scores are common with bfloat16 logits, and `topk` breaks ties
    arbitrarily: so of those that tie for a row's last place the lowest tokens are looked up. Which of the
    impossible continuations fill up the ranking does not matter.

    Args:
        logprobs: [G, r, V] float32; r rows of each of G groups; -inf where a row may not take a token.
        scores: [G, r] float32, cumulative log-probability of each row, at most 0.
        count: K.
    """
    _, num_rows, vocab_size = logprobs.shape
    most = min(count, vocab_size)
    if sees(logprobs.device):  # one more, to see whether the last place is contested; and in wide groups fewer at first
        most = min(count + 1, vocab_size)
        per_row = most if most < WIDE else max(WIDE // 4, -(-most // num_rows))
        while True:
            best, tokens = logprobs.topk(per_row, dim=-1)
            total = best + scores[..., None]
            ranked = _merged(total, tokens, vocab_size, count)
            least = ranked.scores[:, -1:].clamp(min=torch.finfo(torch.float32).min)
            if (total[..., -1] < least).all():  # and so is whatever the rows have left
                return ranked
            if per_row == most:
                break
            per_row = min(4 * per_row, most)
    else:
        best, tokens = logprobs.topk(most, dim=-1)
        total = best + scores[..., None]
    tokens = _lowest_of_ties(logprobs + scores[..., None], total, tokens)
    return _merged(total, tokens, vocab_size, count)


def _lowest_of_ties(every: torch.Tensor, best: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The `tokens` [..., k] of the `best` [..., k], the lowest of those that tie for the last place.

    Args:
        every: [..., V], of which `best` are the best.
    """
    last, count = best[..., -1:], best.shape[-1]
    from_end = torch.arange(every.shape[-1], 0, -1, dtype=torch.int32, device=every.device)
    ties = (every == last) * from_end
    lowest = ties.topk(count, dim=-1).indices  # beyond the last tie anything, which is not needed
    is_above = best > last
    nth_tie = torch.arange(count, device=every.device) - is_above.sum(dim=-1, keepdim=True)
    return torch.where(is_above, tokens, lowest.gather(-1, nth_tie.clamp(min=0)))


def _merged(total: torch.Tensor, tokens: torch.Tensor, vocab_size: int, count: int) -> Candidates[torch.Tensor]:
    """The best `count` of all rows' continuations [G, r, k]. Their keys are unique, so nothing breaks ties."""
    _, num_rows, per_row = total.shape
    worse_is_more = (0 - total).view(torch.int32)  # as integers these compare as the scores do: no sign bit is set
    cells = tokens + _row_starts(num_rows, vocab_size, total.device)
    keys = torch.add(cells, worse_is_more, alpha=SCORE_UNIT).flatten(1)
    places = keys.topk(min(count, keys.shape[1]), dim=1, largest=False).indices
    scores = total.flatten(1).gather(1, places)
    return Candidates(places // per_row, tokens.flatten(1).gather(1, places), scores)


@lru_cache
def _row_starts(num_rows: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, num_rows * vocab_size, vocab_size, device=device)[:, None]
