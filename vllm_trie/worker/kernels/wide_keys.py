"""The best continuations of groups of many beams, in order; `search.rank` has it in torch, from log-probabilities.

A block of 64 tiles is to its tiles what a tile is to its tokens. As `search.rank` explains, the best K tiles hold the
best K tokens; likewise the best K blocks hold the best K tiles. So a kernel makes an order key of each block of all
rows, another one of each tile in the best blocks, and a third one of each token in the best tiles. Between them
`torch.topk` chooses among 64 K keys, or among as many as there are blocks, and never among a vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_trie.search.devices import constant
from vllm_trie.search.filters import LogitsFilters
from vllm_trie.search.rank import SCORE_UNIT, TILE
from vllm_trie.worker.kernels.order_keys import KEY_UNIT, LAST_KEY, order_key
from vllm_trie.worker.kernels.tiles import (
    TILES,
    RowLogits,
    Tiles,
    log_min_p,
    logprobs_of,
    normalise,
    num_better_than,
)
from vllm_trie.worker.sizes import cdiv, next_power_of_2

KEYS_AT_A_TIME = 1024  # that a program makes
WARPS_TO_SPLIT = 4
OF_ROW = tl.constexpr(4)  # maximum, what the log-sum-exp is more, least log-probability that is kept, score


class OwnTokens(NamedTuple):
    """Tokens whose scores are asked for in each row, whatever ranks.

    Args:
        ids: Theirs.
        most: They count as -inf unless fewer tokens of the row than this are better.
    """

    ids: tuple[int, ...] = ()
    most: int = 0


def have_keys(num_rows: int, per_row: int) -> bool:
    """Whether all continuations of a group have order keys of their own."""
    return num_rows * per_row < SCORE_UNIT


def best_of_groups(
    logits: RowLogits, tiles: Tiles, scores: torch.Tensor, count: int, filters: LogitsFilters, own_tokens: OwnTokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best continuations of all rows of each group together.

    Args:
        logits: Of G groups with r rows each.
        tiles: Theirs.
        scores: [G, r] float32, contiguous.
        count: K, at most as many as a group has.
        filters: Of those, `can_filter` says which.
        own_tokens: S of them.

    Returns:
        [G, K] int64, order keys as in `search.rank`, in order; and [G * r, S] float32.
    """
    (num_groups, num_rows), device, num_blocks = scores.shape, scores.device, tiles.maxima.shape[1]
    num_own = len(own_tokens.ids)
    keys = torch.empty(num_groups, num_rows * num_blocks, dtype=torch.int64, device=device)
    of_rows = torch.empty(scores.numel(), OF_ROW.value, dtype=torch.float32, device=device)
    own = torch.empty(scores.numel(), num_own, dtype=torch.float32, device=device)
    of_own = constant(own_tokens.ids, device), num_own, own_tokens.most, own
    sizes = sizes_to_rank_blocks(num_blocks)
    _rank_blocks[scores.numel(),](
        *logits.arguments, *tiles.arguments, scores, num_rows, log_min_p(filters), *of_own, keys, of_rows,
        **sizes, num_warps=warps_to_rank_blocks(sizes["blocks"]),
    )  # fmt: skip
    chosen, keys = split(keys, count, TILES)
    _rank_tiles[cdiv(keys.shape[1], KEYS_AT_A_TIME), num_groups](
        chosen, chosen.shape[1], tiles.best, of_rows, logits.values.shape[1], num_blocks, num_rows, keys, tiles=TILES,
        tile=TILE, lanes=KEYS_AT_A_TIME, num_warps=WARPS_TO_SPLIT,
    )  # fmt: skip
    chosen, keys = split(keys, count, TILE)
    _rank_tokens[cdiv(keys.shape[1], KEYS_AT_A_TIME), num_groups](
        *logits.arguments, chosen, chosen.shape[1], of_rows, num_blocks * TILES, num_rows, keys, tile=TILE,
        lanes=KEYS_AT_A_TIME, num_warps=WARPS_TO_SPLIT,
    )  # fmt: skip
    return in_order(keys, count), own


def split(keys: torch.Tensor, count: int, num_parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count` of each group's keys, in no order, and room for `num_parts` keys in the place of each."""
    chosen = keys if keys.shape[1] <= count else keys.topk(count, largest=False, sorted=False).values
    return chosen, keys.new_empty(len(keys), chosen.shape[1] * num_parts)


def in_order(keys: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` of each group's keys."""
    return keys.topk(count, largest=False).values


def sizes_to_rank_blocks(num_blocks: int) -> dict[str, int]:
    """What `_rank_blocks` is compiled for."""
    return {"blocks": next_power_of_2(num_blocks), "tiles": TILES, "tile": TILE}


def warps_to_rank_blocks(blocks: int) -> int:
    """Warps of a program of `_rank_blocks`."""
    return 4 if blocks <= 16 else 8


@triton.jit(
    do_not_specialize=["vocab_size", "num_barred", "num_blocks", "num_rows", "num_own", "own_most"],
    do_not_specialize_on_alignment=["index", "scores"],
)
def _rank_blocks(
    logits, index, stride, vocab_size, barred, num_barred, temperature, best, maxima, sums, num_blocks, scores,
    num_rows, log_min_p, own_tokens, num_own, own_most, own, keys, of_rows, blocks: tl.constexpr, tiles: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """Make order keys of a row's blocks, and note what is to be known of the row: a program per row.

    Args:
        keys: [R, B].
        of_rows: [R, OF_ROW].
    """
    row = tl.program_id(0)
    of_rows += row * OF_ROW
    score = normalise(maxima, sums, num_blocks, scores, row, of_rows, blocks)
    block, number = tl.arange(0, blocks), tl.arange(0, tiles)
    best += row.to(tl.int64) * num_blocks * tiles
    of_tiles = tl.load(
        best + block[:, None] * tiles + number[None, :], mask=(block < num_blocks)[:, None], other=float("-inf")
    )
    highest = tl.max(of_tiles, axis=1) - tl.load(of_rows) - tl.load(of_rows + 1)
    least = tl.max(highest, axis=0) + log_min_p
    tl.store(of_rows + 2, least)
    tl.store(of_rows + 3, score)
    highest = tl.where(highest < least, float("-inf"), highest)
    reached = tl.where(score > float("-inf"), highest, score) + score
    place = (row % num_rows) * num_blocks + block
    tl.store(keys + row.to(tl.int64) * num_blocks + block, order_key(reached, place), mask=block < num_blocks)

    values = logits + tl.load(index + row) * stride
    for at in range(num_own):
        own_token = tl.load(own_tokens + at).to(tl.int32)
        own_logprob = logprobs_of(values, of_rows, own_token, vocab_size, barred, num_barred, temperature)
        num_better = num_better_than(
            own_logprob, own_most, values, of_rows, best, vocab_size, barred, num_barred, temperature, num_blocks,
            tiles, tile,
        )  # fmt: skip
        is_best = (own_logprob >= least) & (num_better < own_most)
        tl.store(own + row * num_own + at, tl.where(is_best, own_logprob + score, float("-inf")))


@triton.jit
def parts_of(chosen, num_chosen, per_entry: tl.constexpr, lanes: tl.constexpr):
    """The places of what is in the chosen ones of a program's group, and where its keys go.

    Returns:
        [lanes] place of the chosen one, number within it, whether there is such a one; and place of the key in the
        group's, and whether there is room for it.
    """
    group, lane = tl.program_id(1).to(tl.int64), tl.program_id(0) * lanes + tl.arange(0, lanes)
    has_room = lane < num_chosen * per_entry
    key = tl.load(chosen + group * num_chosen + lane // per_entry, mask=has_room, other=LAST_KEY)
    exists = key < LAST_KEY
    return tl.where(exists, key % KEY_UNIT, 0).to(tl.int32), lane % per_entry, exists, lane, has_room


@triton.jit(do_not_specialize=["num_chosen", "vocab_size", "num_blocks", "num_rows"])
def _rank_tiles(
    chosen, num_chosen, best, of_rows, vocab_size, num_blocks, num_rows, keys, tiles: tl.constexpr, tile: tl.constexpr,
    lanes: tl.constexpr,
):  # fmt: skip
    """Make order keys of the tiles in chosen blocks: programs per part of these and group."""
    group = tl.program_id(1).to(tl.int64)
    block, number, exists, at, has_room = parts_of(chosen, num_chosen, tiles, lanes)
    row, number = block // num_blocks, block % num_blocks * tiles + number
    exists &= number * tile < vocab_size
    of_row, num_tiles = group * num_rows + row, num_blocks * tiles
    highest = tl.load(best + of_row * num_tiles + number, mask=exists, other=float("-inf"))
    of_rows += of_row * OF_ROW
    highest = highest - tl.load(of_rows) - tl.load(of_rows + 1)
    score = tl.load(of_rows + 3)
    highest = tl.where(highest < tl.load(of_rows + 2), float("-inf"), highest)
    reached = tl.where(score > float("-inf"), highest, score) + score
    key = tl.where(exists, order_key(reached, row * num_tiles + number), LAST_KEY)
    tl.store(keys + group * num_chosen * tiles + at, key, mask=has_room)


@triton.jit(
    do_not_specialize=["vocab_size", "num_barred", "num_chosen", "num_tiles", "num_rows"],
    do_not_specialize_on_alignment=["index"],
)
def _rank_tokens(
    logits, index, stride, vocab_size, barred, num_barred, temperature, chosen, num_chosen, of_rows, num_tiles,
    num_rows, keys, tile: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Make order keys of the tokens in chosen tiles: programs per part of these and group."""
    group = tl.program_id(1).to(tl.int64)
    of_tile, number, exists, at, has_room = parts_of(chosen, num_chosen, tile, lanes)
    row, token = of_tile // num_tiles, of_tile % num_tiles * tile + number
    exists &= token < vocab_size
    of_row = group * num_rows + row
    values, of_rows = logits + tl.load(index + of_row) * stride, of_rows + of_row * OF_ROW
    logprob = logprobs_of(values, of_rows, token, vocab_size, barred, num_barred, temperature)
    logprob = tl.where(logprob < tl.load(of_rows + 2), float("-inf"), logprob)
    place = row.to(tl.int64) * vocab_size + token
    key = tl.where(exists, order_key(logprob + tl.load(of_rows + 3), place), LAST_KEY)
    tl.store(keys + group * num_chosen * tile + at, key, mask=has_room)
