"""The best continuations of groups of many beams, sorted; `search.rank` has it in torch, from log-probabilities.

A block of 64 tiles is to its tiles what a tile is to its tokens. As `search.rank` explains, the best K tiles hold the
best K tokens; likewise the best K blocks hold the best K tiles. So kernels make an order key of each block of all rows,
then of each tile in the best blocks, and then of each token in the best tiles. In between, `torch.topk` selects among
64 K keys, or among as many as there are blocks, but never among a vocabulary. What goes on and what ends are two lists
of each group, which the same launches rank.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import triton
import triton.language as tl

from vllm_trie.search.constraints.stops import StopConstraints
from vllm_trie.search.rank import SCORE_UNIT, TILE
from vllm_trie.worker.kernels.order_keys import KEY_UNIT, LAST_KEY, order_key_in_kernel
from vllm_trie.worker.kernels.tiles import (
    ALLOWED,
    GOING,
    TILES,
    KernelKeys,
    KernelTiles,
    logprobs_in_kernel,
    normalise_in_kernel,
)
from vllm_trie.worker.launches import cdiv, next_power_of_2

KEYS_AT_A_TIME = 1024  # that a program makes
WARPS_TO_SPLIT = 4
# Maximum, log-sum-exp less it, least log-probabilities of what goes on and of what ends that are kept, score.
OF_ROW, LEAST, SCORE = tl.constexpr(5), tl.constexpr(2), tl.constexpr(4)


class AmongBest(NamedTuple):
    """Leaves out what ends unless few tokens of its row are better.

    Args:
        stops: All that ends: each is looked at, so they must be few. Without any, nothing is left out.
        most: Fewer tokens than this must be better.
    """

    stops: StopConstraints
    most: int


def kernels_have_keys(num_rows: int, per_row: int) -> bool:
    """Whether all continuations of a group have distinct order keys."""
    return num_rows * per_row < SCORE_UNIT


def launch_best_of_groups(
    tiles: KernelTiles, scores: torch.Tensor, *, count: int, log_min_p: float, among: AmongBest
) -> KernelKeys:
    """The best continuations of all rows of each group together.

    Args:
        tiles: Of G groups with r rows each.
        scores: [G, r] float32, contiguous.
        count: K, at most as many as a group has.
        log_min_p: How far below a row's best they may be.
        among: Bounds what ends.

    Returns:
        [2, G, K] order keys, sorted: of what goes on, then of what ends.
    """
    (num_groups, num_rows), device, num_blocks = scores.shape, scores.device, tiles.num_blocks
    mixed, vocab_size = tiles.of_logits[5], cast(int, tiles.of_logits[3])
    ends = among.stops.columns(vocab_size, device)
    num_lists = 2 * num_groups
    keys = torch.empty(num_lists, num_rows * num_blocks, dtype=torch.int64, device=device)
    of_rows = torch.empty(scores.numel(), OF_ROW.value, dtype=torch.float32, device=device)
    sizes = kernel_sizes_to_rank_blocks(num_blocks)
    _rank_blocks_kernel[scores.numel(),](
        *tiles.of_logits, *tiles[1:], scores, num_rows, log_min_p, ends, len(ends), among.most, keys, of_rows, **sizes,
        num_warps=warps_to_rank_blocks(sizes["blocks"]),
    )  # fmt: skip
    chosen, keys = split_kernel_keys(keys, count, TILES)
    _rank_tiles_kernel[cdiv(keys.shape[1], KEYS_AT_A_TIME), num_lists](
        chosen, chosen.shape[1], *tiles[1:4], mixed, of_rows, vocab_size, num_blocks, num_groups, num_rows, keys,
        tiles=TILES, tile=TILE, lanes=KEYS_AT_A_TIME, num_warps=WARPS_TO_SPLIT,
    )  # fmt: skip
    chosen, keys = split_kernel_keys(keys, count, TILE)
    _rank_tokens_kernel[cdiv(keys.shape[1], KEYS_AT_A_TIME), num_lists](
        *tiles.of_logits, chosen, chosen.shape[1], of_rows, num_blocks * TILES, num_groups, num_rows, keys, tile=TILE,
        lanes=KEYS_AT_A_TIME, num_warps=WARPS_TO_SPLIT,
    )  # fmt: skip
    return KernelKeys(kernel_keys_in_order(keys, count).view(2, num_groups, count), of_rows)


def split_kernel_keys(keys: torch.Tensor, count: int, num_parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count` of each group's keys, unsorted, and room for `num_parts` keys in place of each."""
    chosen = keys if keys.shape[1] <= count else keys.topk(count, largest=False, sorted=False).values
    return chosen, keys.new_empty(len(keys), chosen.shape[1] * num_parts)


def kernel_keys_in_order(keys: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` of each group's keys, sorted."""
    return keys.topk(count, largest=False).values


def kernel_sizes_to_rank_blocks(num_blocks: int) -> dict[str, int]:
    """The sizes that `_rank_blocks_kernel` is compiled for."""
    return {"blocks": next_power_of_2(num_blocks), "tiles": TILES, "tile": TILE}


def warps_to_rank_blocks(blocks: int) -> int:
    """Warps of a program of `_rank_blocks_kernel`."""
    return 4 if blocks <= 16 else 8


@triton.jit
def num_better_in_kernel(
    own, most, values, of_row, going, ending, vocab_size, classes, mixed, temperature, num_blocks, tiles: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """How many tokens of a row are better than log-probability `own`; may stop counting at `most`.

    Most blocks are skipped: no tile in them is better.

    Args:
        going, ending: Maxima of the row's tiles.
    """
    num_better, block = 0, 0
    while (block < num_blocks) & (num_better < most):
        number, of_mixed = tl.arange(0, tiles), tl.load(mixed + block)
        at = (of_mixed - 1) * tiles + number
        of_ends = tl.load(ending + at, mask=number < tl.where(of_mixed > 0, tiles, 0), other=float("-inf"))
        of_tiles = tl.maximum(tl.load(going + block * tiles + number), of_ends)
        of_tiles = of_tiles - tl.load(of_row) - tl.load(of_row + 1)
        if tl.max((of_tiles > own).to(tl.int32), axis=0) > 0:
            token = block * tiles * tile + tl.arange(0, tiles * tile)
            logprob = logprobs_in_kernel(values, of_row, token, vocab_size, classes, temperature, ALLOWED)
            num_better += tl.sum((logprob > own).to(tl.int32), axis=0)
        block += 1
    return num_better


@triton.jit(
    do_not_specialize=["vocab_size", "num_mixed", "num_blocks", "num_rows", "num_ends", "most_better"],
    do_not_specialize_on_alignment=["index", "scores"],
)
def _rank_blocks_kernel(
    logits, index, stride, vocab_size, classes, mixed, temperature, going, ending, num_mixed, maxima, sums, num_blocks,
    scores, num_rows, log_min_p, ends, num_ends, most_better, keys, of_rows, blocks: tl.constexpr, tiles: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """Makes order keys of a row's blocks, and notes what later kernels must know of the row: a program per row.

    Args:
        ends: All that ends, if what is left out of it depends on what is better; otherwise empty.
        keys: [2, R, B].
        of_rows: [R, OF_ROW].
    """
    row, num_rows_in_all = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    of_rows += row * OF_ROW
    score = normalise_in_kernel(maxima, sums, num_blocks, scores, row, of_rows, blocks)
    block, number = tl.arange(0, blocks), tl.arange(0, tiles)
    going += row * num_blocks * tiles
    ending += row * num_mixed * tiles
    of_mixed, of_block = tl.load(mixed + block, mask=block < num_blocks, other=0), number[None, :]
    goes_on = tl.load(
        going + block[:, None] * tiles + of_block, mask=(block < num_blocks)[:, None], other=float("-inf")
    )
    ends_by = ending + (of_mixed - 1)[:, None] * tiles + of_block
    ends_by = tl.load(ends_by, mask=(of_mixed > 0)[:, None], other=float("-inf"))
    goes_on = tl.max(goes_on, axis=1) - tl.load(of_rows) - tl.load(of_rows + 1)
    ends_by = tl.max(ends_by, axis=1) - tl.load(of_rows) - tl.load(of_rows + 1)
    least = tl.max(tl.maximum(goes_on, ends_by), axis=0) + log_min_p
    least_to_end = least
    if num_ends > 0:
        least_to_end = tl.full([], float("inf"), tl.float32)
        values = logits + tl.load(index + row) * stride
        for at in range(num_ends):
            token = tl.load(ends + at).to(tl.int32) + tl.arange(0, 1)
            own = tl.max(logprobs_in_kernel(values, of_rows, token, vocab_size, classes, temperature, ALLOWED))
            num_better = num_better_in_kernel(
                own, most_better, values, of_rows, going, ending, vocab_size, classes, mixed, temperature, num_blocks,
                tiles, tile,
            )  # fmt: skip
            is_best = (own >= least) & (num_better < most_better)
            least_to_end = tl.where(is_best, tl.minimum(least_to_end, own), least_to_end)
    tl.store(of_rows + LEAST, least)
    tl.store(of_rows + LEAST + 1, least_to_end)
    tl.store(of_rows + SCORE, score)

    place, keys = (row % num_rows) * num_blocks + block, keys + row * num_blocks
    reached = tl.where(score > float("-inf"), tl.where(goes_on < least, float("-inf"), goes_on), score) + score
    tl.store(keys + block, order_key_in_kernel(reached, place), mask=block < num_blocks)
    reached = tl.where(score > float("-inf"), tl.where(ends_by < least_to_end, float("-inf"), ends_by), score) + score
    key = tl.where(reached > float("-inf"), order_key_in_kernel(reached, place), LAST_KEY)
    tl.store(keys + num_rows_in_all.to(tl.int64) * num_blocks + block, key, mask=block < num_blocks)


@triton.jit
def parts_in_kernel(chosen, num_chosen, per_entry: tl.constexpr, lanes: tl.constexpr):
    """The places of what is in the chosen entries of a program's group, and where its keys go.

    Returns:
        [lanes] each: place of the chosen entry, number within it, whether there is such an entry; place of the key in
        the group's keys, and whether there is room for it.
    """
    group, lane = tl.program_id(1).to(tl.int64), tl.program_id(0) * lanes + tl.arange(0, lanes)
    has_room = lane < num_chosen * per_entry
    key = tl.load(chosen + group * num_chosen + lane // per_entry, mask=has_room, other=LAST_KEY)
    exists = key < LAST_KEY
    return tl.where(exists, key % KEY_UNIT, 0).to(tl.int32), lane % per_entry, exists, lane, has_room


@triton.jit(do_not_specialize=["num_chosen", "num_mixed", "vocab_size", "num_blocks", "num_groups", "num_rows"])
def _rank_tiles_kernel(
    chosen, num_chosen, going, ending, num_mixed, mixed, of_rows, vocab_size, num_blocks, num_groups, num_rows, keys,
    tiles: tl.constexpr, tile: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Makes order keys of the tiles in chosen blocks: programs per part of these and list of a group."""
    number_of_list = tl.program_id(1).to(tl.int64)
    group, wanted = number_of_list % num_groups, (number_of_list // num_groups).to(tl.int32)
    block, of_block, exists, at, has_room = parts_in_kernel(chosen, num_chosen, tiles, lanes)
    row, block = block // num_blocks, block % num_blocks
    number = block * tiles + of_block
    exists &= number * tile < vocab_size
    of_row, num_tiles = group * num_rows + row, num_blocks * tiles
    goes_on, of_mixed = going + of_row * num_tiles + number, tl.load(mixed + block, mask=exists, other=0)
    ends = ending + (of_row * num_mixed + of_mixed - 1) * tiles + of_block
    is_written = tl.where(wanted == GOING, exists, of_mixed > 0)
    highest = tl.load(tl.where(wanted == GOING, goes_on, ends), mask=is_written, other=float("-inf"))
    of_rows += of_row * OF_ROW
    highest = highest - tl.load(of_rows) - tl.load(of_rows + 1)
    score = tl.load(of_rows + SCORE)
    highest = tl.where(highest < tl.load(of_rows + LEAST + wanted), float("-inf"), highest)
    reached = tl.where(score > float("-inf"), highest, score) + score
    exists = tl.where(wanted == GOING, exists, exists & (reached > float("-inf")))
    key = tl.where(exists, order_key_in_kernel(reached, row * num_tiles + number), LAST_KEY)
    tl.store(keys + number_of_list * num_chosen * tiles + at, key, mask=has_room)


@triton.jit(
    do_not_specialize=["vocab_size", "num_chosen", "num_tiles", "num_groups", "num_rows"],
    do_not_specialize_on_alignment=["index"],
)
def _rank_tokens_kernel(
    logits, index, stride, vocab_size, classes, mixed, temperature, chosen, num_chosen, of_rows, num_tiles, num_groups,
    num_rows, keys, tile: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Makes order keys of the tokens in chosen tiles: programs per part of these and list of a group."""
    number_of_list = tl.program_id(1).to(tl.int64)
    group, wanted = number_of_list % num_groups, (number_of_list // num_groups).to(tl.int32)
    of_tile, number, exists, at, has_room = parts_in_kernel(chosen, num_chosen, tile, lanes)
    row, token = of_tile // num_tiles, of_tile % num_tiles * tile + number
    exists &= token < vocab_size
    of_row = group * num_rows + row
    values, of_rows = logits + tl.load(index + of_row) * stride, of_rows + of_row * OF_ROW
    logprob = logprobs_in_kernel(values, of_rows, token, vocab_size, classes, temperature, wanted)
    logprob = tl.where(logprob < tl.load(of_rows + LEAST + wanted), float("-inf"), logprob)
    place, score = row.to(tl.int64) * vocab_size + token, logprob + tl.load(of_rows + SCORE)
    exists = tl.where(wanted == GOING, exists, exists & (score > float("-inf")))
    key = tl.where(exists, order_key_in_kernel(score, place), LAST_KEY)
    tl.store(keys + number_of_list * num_chosen * tile + at, key, mask=has_room)
