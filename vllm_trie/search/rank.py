"""Ranks the continuations of many groups at once, in total order, and chooses a slot for each of the next beams.

The order is: score descending, parent ascending, token ascending. Slots are chosen so that copying rows never
overwrites what is still needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from vllm_trie.search.devices import NEVER, filled_for_search, is_searched_on_host, search_arange
from vllm_trie.search.parts import CELLS, search_rows_near_at_hand

Array = TypeVar("Array")  # torch.Tensor, or np.ndarray on the host

TILE = 64  # tokens
MIN_TILES = 256  # with fewer, tiles are no gain
SCORE_UNIT = 1 << 31  # in an order key, above the place; a group has fewer continuations
NO_KEY = (1 << 63) - 1  # sorts last
MANY = 256  # from this count on, numpy is faster than torch on a host


class SearchCandidates(NamedTuple, Generic[Array]):
    """Continuations of each group's beams: tensors [G, K]; on the host [K], of a single group."""

    parents: Array  # the row that the continuation extends
    tokens: Array
    scores: Array  # float32, cumulative log-probability; -inf where there is none

    @staticmethod
    def join(parts: Sequence[SearchCandidates[torch.Tensor]]) -> SearchCandidates[torch.Tensor]:
        """Concatenates candidates, part after part."""
        return SearchCandidates(*(torch.cat(fields, dim=1) for fields in zip(*parts, strict=True)))


class SearchRankingLimits(NamedTuple):
    """Limits a ranking to some continuations.

    Args:
        biases: [V] float32, 0 for the tokens that are ranked and -inf for others.
        least: [G, r] float32, the lowest log-probability that is ranked, by row; None: no limit.
    """

    biases: torch.Tensor
    least: torch.Tensor | None = None


def pick_search_candidates(
    candidates: SearchCandidates[torch.Tensor], chosen: torch.Tensor
) -> SearchCandidates[torch.Tensor]:
    """The candidates at `chosen` [G, n]."""
    parents, tokens, scores = candidates
    return SearchCandidates(parents.gather(1, chosen), tokens.gather(1, chosen), scores.gather(1, chosen))


def search_candidates_in_order(
    candidates: SearchCandidates[torch.Tensor], vocab_size: int
) -> SearchCandidates[torch.Tensor]:
    """The candidates in rank order, the best first."""
    keys = _search_order_keys(candidates.scores, candidates.parents * vocab_size + candidates.tokens)
    return pick_search_candidates(candidates, keys.argsort(dim=1))


def rank_search_candidates(
    logprobs: torch.Tensor, scores: torch.Tensor, count: int, among: SearchRankingLimits | None = None
) -> SearchCandidates[torch.Tensor]:
    """The best `count` continuations of each group by cumulative log-probability; fewer if there are fewer.

    The best `count` lie in the `count` tiles of tokens with the best maxima, by the same total order: anything in
    another tile is preceded by the maxima of these tiles, which are `count` continuations. Equal scores are common with
    bfloat16 logits, so order keys include the place. Which impossible continuations fill up the ranking does not
    matter.

    Args:
        logprobs: [G, r, V] float32; r rows of each of G groups; -inf where a row may not take a token.
        scores: [G, r] float32, cumulative log-probability of each row, at most 0.
        count: K.
        among: What is ranked; the others count as impossible. None: everything.

    Returns:
        [G, K], the best first.
    """
    _, num_rows, vocab_size = logprobs.shape
    count, per_row = min(count, num_rows * vocab_size), -(-vocab_size // TILE)
    if num_rows * per_row <= MIN_TILES:
        if among is not None:
            logprobs = _search_logprobs_reaching(logprobs + among.biases, among.least)
        total = (logprobs + scores[..., None]).flatten(1)
        places = _first_search_keys(_search_order_keys(total, search_arange(total.shape[1], total.device)), count)
        return SearchCandidates(places // vocab_size, places % vocab_size, total.gather(1, places))
    best = _best_of_search_tiles(logprobs, among)
    keys = _search_order_keys((best + scores[..., None]).flatten(1), search_arange(num_rows * per_row, best.device))
    tiles = _first_search_keys(keys, min(count, keys.shape[1]))
    rows, ends_in_tile = tiles // per_row, vocab_size % TILE > 0
    first = rows * vocab_size + tiles % per_row * TILE if ends_in_tile else tiles * TILE
    places = first[..., None] + search_arange(TILE, tiles.device)
    of_tokens = _logprobs_of_search_tiles(logprobs, tiles, places)
    if among is not None or ends_in_tile:
        tokens = places - (rows * vocab_size)[..., None]
    if among is not None:
        of_tokens = of_tokens + among.biases.take(tokens.clamp(max=vocab_size - 1))
        of_tokens = _search_logprobs_reaching(
            of_tokens, among.least if among.least is None else among.least.gather(1, rows)
        )
    total = of_tokens + scores.gather(1, rows)[..., None]
    keys = _search_order_keys(total, places)
    if ends_in_tile:
        keys = keys.where(tokens < vocab_size, NO_KEY)
    chosen = _first_search_keys(keys.flatten(1), count)
    places, total = (field.flatten(1).gather(1, chosen) for field in (places, total))
    return SearchCandidates(places // vocab_size, places % vocab_size, total)


def _best_of_search_tiles(logprobs: torch.Tensor, among: SearchRankingLimits | None) -> torch.Tensor:
    """[G, r, T], the maximum of each tile; the last tile may have fewer tokens."""
    if among is None:
        return _search_maxima(logprobs)
    num_groups, num_rows, vocab_size = logprobs.shape
    rows = logprobs.flatten(0, 1)
    some_rows = (
        search_rows_near_at_hand(rows)
        if is_searched_on_host(rows.device)
        else torch.split(rows, max(CELLS // vocab_size, 1))
    )
    best = torch.cat([_search_maxima(some + among.biases) for some in some_rows])
    return _search_logprobs_reaching(best.view(num_groups, num_rows, -1), among.least)


def _logprobs_of_search_tiles(logprobs: torch.Tensor, tiles: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[G, n, TILE], the log-probabilities in n tiles of each group; arbitrary beyond a row's end.

    Args:
        logprobs: [G, r, V].
        tiles: [G, n], tile numbers, counted over all rows.
        places: [G, n, TILE], the places of their contents in [r * V].
    """
    num_groups, num_rows, vocab_size = logprobs.shape
    if vocab_size % TILE:
        return logprobs.flatten(1).gather(1, places.clamp(max=num_rows * vocab_size - 1).flatten(1)).view(places.shape)
    per_group = num_rows * vocab_size // TILE
    of_all = tiles + search_arange(num_groups, tiles.device)[:, None] * per_group
    return logprobs.reshape(-1, TILE).index_select(0, of_all.flatten()).view(places.shape)


def _search_logprobs_reaching(logprobs: torch.Tensor, least: torch.Tensor | None) -> torch.Tensor:
    """Log-probabilities [G, n, m] with -inf for those below `least` [G, n]."""
    return logprobs if least is None else logprobs.where(logprobs >= least[..., None], NEVER)


def _search_maxima(logprobs: torch.Tensor) -> torch.Tensor:
    best = _in_search_tiles(logprobs).amax(dim=-1)
    if (num_tokens := best.shape[-1] * TILE) < logprobs.shape[-1]:
        best = torch.cat([best, logprobs[..., num_tokens:].amax(dim=-1, keepdim=True)], dim=-1)
    return best


def _search_order_keys(total: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Unique int64 keys, lower for a better score and, for equal scores, for a lower place."""
    worse_is_more = total.abs().view(torch.int32)  # bits of floats without a sign compare as the floats do
    return torch.add(places, worse_is_more, alpha=SCORE_UNIT)


def _first_search_keys(keys: torch.Tensor, count: int) -> torch.Tensor:
    """[G, count], the positions of the lowest of unique keys [G, n], in order."""
    if count < MANY or not is_searched_on_host(keys.device):
        return keys.topk(count, dim=1, largest=False).indices
    values = keys.numpy()
    places, groups = values.argpartition(count - 1, axis=1)[:, :count], np.arange(len(values))[:, None]
    return torch.from_numpy(places[groups, values[groups, places].argsort(axis=1)])


def _in_search_tiles(values: torch.Tensor) -> torch.Tensor:
    """[..., V] as [..., T, TILE], without the remainder."""
    num_tiles = values.shape[-1] // TILE
    return values[..., : num_tiles * TILE].view(*values.shape[:-1], num_tiles, TILE)


def search_topk(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `torch.topk` of [..., V]; of a large vocabulary it ranks only the tiles with the greatest maxima."""
    vocab_size = values.shape[-1]
    num_tiles = vocab_size // TILE
    if num_tiles < max(MIN_TILES, 4 * count):
        best, tokens = values.topk(count, dim=-1)
        return best, tokens
    rest = num_tiles * TILE
    in_tiles = _in_search_tiles(values)
    tiles = in_tiles.amax(dim=-1).topk(count, dim=-1).indices[..., None].expand(*values.shape[:-1], count, TILE)
    some = torch.cat([in_tiles.gather(-2, tiles).flatten(-2), values[..., rest:]], dim=-1)
    tokens = (TILE * tiles + search_arange(TILE, values.device)).flatten(-2)
    tokens = torch.cat([tokens, search_arange(vocab_size, values.device)[rest:].expand(*values.shape[:-1], -1)], dim=-1)
    best, places = some.topk(count, dim=-1)
    return best, tokens.gather(-1, places)


def choose_next_search_beams(
    candidates: SearchCandidates[torch.Tensor], lives: torch.Tensor, width: int, num_rows: int
) -> SearchCandidates[torch.Tensor]:
    """The first `width` live candidates become the next beams, [G, b] by slot.

    If there are fewer, some slots have no beam: score -inf, any token. Such a slot continues itself, or the only row
    there is, so that nothing is copied for it.

    Args:
        candidates: [G, K], the best first.
        lives: [G, K] bool, which of them may go on.
        width: Beams per group, b.
        num_rows: Rows per group that they continue: 1 or b.
    """
    return in_search_slots(candidates, choose_search_slots(candidates.parents, lives, width), num_rows)


def choose_search_slots(parents: torch.Tensor, lives: torch.Tensor, width: int) -> torch.Tensor:
    """Which candidate [G, K] each slot takes, [G, b]; K where it takes none.

    The first child of a parent stays in its parent's slot; every other child takes a dead slot, one whose own beam has
    no child, in ascending order. Sources (survivors) and destinations (dead slots) are therefore disjoint.
    """
    (num_groups, count), device = parents.shape, parents.device
    never = count + 1  # later than the last that lives on, which is K if fewer than b do
    born = torch.where(lives, search_arange(count, device), filled_for_search((), never, device))
    first_child = filled_for_search((num_groups, width), never, device).scatter_reduce(1, parents, born, "amin")
    is_other = lives & (first_child.gather(1, parents) != born)
    last = torch.searchsorted(lives.cumsum(dim=1), filled_for_search((num_groups, 1), width, device))
    is_dead = first_child > last
    nth_other = torch.searchsorted(is_other.cumsum(dim=1), is_dead.cumsum(dim=1))
    return torch.where(is_dead, nth_other, first_child)


def in_search_slots(
    candidates: SearchCandidates[torch.Tensor], chosen: torch.Tensor, num_rows: int
) -> SearchCandidates[torch.Tensor]:
    """The candidates [G, K] that slots take by `chosen`, [G, b]."""
    count, width = candidates.tokens.shape[1], chosen.shape[1]
    if is_searched_on_host(chosen.device) and max(map(max, chosen.tolist())) < count:  # every slot has a beam
        return pick_search_candidates(candidates, chosen)
    has_beam = chosen < count
    parents, tokens, scores = pick_search_candidates(candidates, chosen.clamp(max=count - 1))
    itself = search_arange(width, chosen.device, num_rows - 1)
    return SearchCandidates(torch.where(has_beam, parents, itself), tokens, scores.where(has_beam, NEVER))
