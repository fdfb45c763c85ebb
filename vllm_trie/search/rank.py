"""Rank the continuations of many groups at once, in total order: score desc, parent asc, token asc."""

from __future__ import annotations

from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

import torch

from vllm_trie.search.devices import numbers, sees

Array = TypeVar("Array")  # torch.Tensor, or np.ndarray on the host

WIDE = 128  # candidates from which on few are asked of each row at first: seldom do many of the best come from one
TILE = 64  # tokens
MIN_TILES = 256  # fewer are no gain
SCORE_UNIT = 1 << 31  # of an order key; a group has fewer continuations
LEAST = torch.finfo(torch.float32).min


class Candidates(NamedTuple, Generic[Array]):
    """Continuations of each group's beams: tensors [G, K]; on the host [K], of a single group."""

    parents: Array  # row the continuation extends
    tokens: Array
    scores: Array  # float32, cumulative log-probability; -inf where there is none


def rank_candidates(logprobs: torch.Tensor, scores: torch.Tensor, count: int) -> Candidates[torch.Tensor]:
    """The best `count` continuations of each group by cumulative log-probability; fewer if there are fewer.

    Each row gives its best, and these are merged. Equal scores are common with bfloat16 logits, and `topk` breaks
    ties arbitrarily: so of those that tie for a row's last place the lowest tokens are looked up. Which of the
    impossible continuations fill up the ranking does not matter.

    Args:
        logprobs: [G, r, V] float32; r rows of each of G groups; -inf where a row may not take a token.
        scores: [G, r] float32, cumulative log-probability of each row, at most 0.
        count: K.

    Returns:
        [G, K], the best first.
    """
    _, num_rows, vocab_size = logprobs.shape
    looks = sees(logprobs.device)
    most = per_row = min(count + looks, vocab_size)  # one more shows whether a row's last place is contested
    if looks and most >= WIDE:
        per_row = max(WIDE // 4, -(-most // num_rows))
    while True:
        best, tokens = topk(logprobs, per_row)
        total = best + scores[..., None]
        if looks and (ranked := _unambiguous(total, tokens, vocab_size, count)) is not None:
            return ranked
        if per_row == most:
            break
        per_row = min(4 * per_row, most)
    tokens = _lowest_of_ties(logprobs + scores[..., None], total, tokens)
    return _merged(total, tokens, vocab_size, count)


def topk(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `torch.topk` of [..., V], which of a large vocabulary needs but the tiles with the greatest maxima."""
    vocab_size = values.shape[-1]
    num_tiles = vocab_size // TILE
    if num_tiles < max(MIN_TILES, 4 * count):
        best, tokens = values.topk(count, dim=-1)
        return best, tokens
    rest = num_tiles * TILE
    in_tiles = values[..., :rest].view(*values.shape[:-1], num_tiles, TILE)
    tiles = in_tiles.amax(dim=-1).topk(count, dim=-1).indices[..., None].expand(*values.shape[:-1], count, TILE)
    some = torch.cat([in_tiles.gather(-2, tiles).flatten(-2), values[..., rest:]], dim=-1)
    tokens = (TILE * tiles + numbers(TILE, values.device)).flatten(-2)
    tokens = torch.cat([tokens, numbers(vocab_size, values.device)[rest:].expand(*values.shape[:-1], -1)], dim=-1)
    best, places = some.topk(count, dim=-1)
    return best, tokens.gather(-1, places)


def _unambiguous(
    total: torch.Tensor, tokens: torch.Tensor, vocab_size: int, count: int
) -> Candidates[torch.Tensor] | None:
    """What `_merged` returns, if it does not depend on what the rows have left."""
    scores, places = total.flatten(1).topk(min(count + 1, total[0].numel()), dim=1)
    in_order, lasts = scores.tolist(), total[..., -1].tolist()
    if any(max(of_rows) >= max(best[:count][-1], LEAST) for of_rows, best in zip(lasts, in_order, strict=True)):
        return None
    if any(score == following for best in in_order for score, following in pairwise(best)):
        return _merged(total, tokens, vocab_size, count)
    scores, places = scores[:, :count], places[:, :count]
    return Candidates(places // total.shape[-1], tokens.flatten(1).gather(1, places), scores)


def _lowest_of_ties(every: torch.Tensor, best: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The `tokens` [..., k] of the `best` [..., k] of `every` [..., V], the lowest that tie for the last place."""
    last, count = best[..., -1:], best.shape[-1]
    from_end = torch.arange(every.shape[-1], 0, -1, dtype=torch.int32, device=every.device)
    _, ties = topk((every == last) * from_end, count)
    is_above = best > last
    nth_tie = torch.arange(count, device=every.device) - is_above.sum(dim=-1, keepdim=True)
    return torch.where(is_above, tokens, ties.gather(-1, nth_tie.clamp(min=0)))


def _merged(total: torch.Tensor, tokens: torch.Tensor, vocab_size: int, count: int) -> Candidates[torch.Tensor]:
    """The best `count` of the rows' continuations [G, r, k]. Their keys are unique, so nothing breaks ties."""
    _, num_rows, per_row = total.shape
    row_starts = vocab_size * numbers(num_rows, total.device)[:, None]
    worse_is_more = total.abs().view(torch.int32)  # bits of floats without a sign compare as the floats do
    keys = torch.add(tokens + row_starts, worse_is_more, alpha=SCORE_UNIT).flatten(1)
    places = keys.topk(min(count, keys.shape[1]), dim=1, largest=False).indices
    return Candidates(places // per_row, tokens.flatten(1).gather(1, places), total.flatten(1).gather(1, places))
