"""Each row's log-sum-exp and its best continuations, in two launches; `search.rank` has it in torch.

The first kernel reads the logits once. It keeps the maximum of every tile, and a maximum and a sum of exponentials of
every block. The second one reads again what lies in the best tiles: as `search.rank` explains, the rest has no say.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_trie.search.devices import constant
from vllm_trie.search.rank import NO_KEY, SCORE_UNIT, TILE

TILES = 64  # of a block
BLOCK = TILES * TILE  # tokens
MOST_TILES = 4096  # of a row; of more a program would spill
MOST_PER_ROW = 128  # continuations of a row that are ranked, likewise
KEY_UNIT, LAST_KEY = tl.constexpr(SCORE_UNIT), tl.constexpr(NO_KEY)
NUM_SCORE_BITS = 31
SCORE_BITS, PLACE_BITS = tl.constexpr(NUM_SCORE_BITS), tl.constexpr(SCORE_UNIT.bit_length() - 1)  # of an order key
TILE_BITS = tl.constexpr(TILE.bit_length() - 1)


class RowLogits(NamedTuple):
    """Logits of R rows, where they are.

    Args:
        values: [N, V], of any floating point type.
        which: [R] int64.
        barred: Tokens that no row may take.
    """

    values: torch.Tensor
    which: torch.Tensor
    barred: tuple[int, ...] = ()

    @property
    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """What kernels take of them."""
        values = self.values
        barred = constant(self.barred, values.device)
        return values, self.which, values.stride(0), values.shape[1], barred, len(self.barred)


class Tiles(NamedTuple):
    """What the first kernel finds: of each row the maximum of each tile; of each block a maximum and a sum."""

    best: torch.Tensor  # [R, B * TILES] float32
    maxima: torch.Tensor  # [R, B] float32
    sums: torch.Tensor  # [R, B] float32, of exponentials of what is left when the maximum is subtracted

    @property
    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """What kernels take of them."""
        return self.best, self.maxima, self.sums, self.maxima.shape[1]


class RowKeys(NamedTuple):
    """The best continuations of each row."""

    keys: torch.Tensor  # [R, P] int64, order keys as in `search.rank`, in no order, and `NO_KEY`; P is a power of two
    normal: torch.Tensor  # [R, 2] float32, maximum and what the log-sum-exp is more; inf where a row ends


def tiles_of(logits: RowLogits) -> Tiles:
    """Read all logits once."""
    num_rows, vocab_size = len(logits.which), logits.values.shape[1]
    num_blocks, device = triton.cdiv(vocab_size, BLOCK), logits.which.device
    best = torch.empty(num_rows, num_blocks * TILES, dtype=torch.float32, device=device)
    maxima, sums = (torch.empty(num_rows, num_blocks, dtype=torch.float32, device=device) for _ in range(2))
    _tile_max[num_rows, num_blocks](
        *logits.arguments, best, maxima, sums, tiles=TILES, tile=TILE, num_warps=WARPS_TO_READ
    )
    return Tiles(best, maxima, sums)


def rank_rows(logits: RowLogits, tiles: Tiles, scores: torch.Tensor, count: int, kept: int) -> RowKeys:
    """The best `count` continuations of each row.

    Args:
        logits: Of R rows.
        tiles: Theirs.
        scores: [G, r] float32, of the rows of G groups, r * G = R.
        count: `kept` at most.
        kept: Keys that there is room for; a power of two.
    """
    num_rows = len(logits.which)
    keys = torch.empty(num_rows, kept, dtype=torch.int64, device=scores.device)
    normal = torch.empty(num_rows, 2, dtype=torch.float32, device=scores.device)
    blocks = triton.next_power_of_2(tiles.maxima.shape[1])
    sizes = sizes_to_rank(blocks, kept)
    of_groups = scores, scores.shape[1], count
    _rank_rows[num_rows,](
        *logits.arguments,
        *tiles.arguments,
        *of_groups,
        keys,
        normal,
        **sizes,
        num_warps=warps_to_rank(kept),
    )
    return RowKeys(keys, normal)


WARPS_TO_READ = 4


def sizes_to_rank(blocks: int, kept: int) -> dict[str, int]:
    """What `_rank_rows` is compiled for: rows of so many blocks, and continuations that are kept of each."""
    tiles = blocks * TILES
    num_bits = NUM_SCORE_BITS + tiles.bit_length() - 1
    return {"blocks": blocks, "tiles": tiles, "tile": TILE, "num_bits": num_bits, "kept": kept}


def warps_to_rank(kept: int) -> int:
    """Warps of a program of `_rank_rows`."""
    return 4 if kept <= 16 else 8 if kept <= 64 else 16


@triton.jit
def order_key(score, place):
    """As `search.rank` has it: lower for a better score and, where scores are equal, for a lower place."""
    return tl.abs(score).to(tl.int32, bitcast=True).to(tl.int64) * KEY_UNIT + place


@triton.jit
def score_of(key):
    """The score in an order key, which is at most 0."""
    return 0.0 - (key // KEY_UNIT).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def cutoff(keys, count, num_bits):
    """The `count`-th of order keys, all different; more than any if there are fewer.

    Bit by bit, so that it takes as long for many as for few. `num_bits`: of scores, and of places as far as they go.
    """
    found = tl.sum(keys * 0, axis=0)
    for at in range(num_bits):
        bit = tl.where(at < SCORE_BITS, SCORE_BITS + PLACE_BITS, num_bits) - 1 - at
        trial = found + (tl.full([], 1, tl.int64) << bit.to(tl.int64))
        num_before = tl.sum((keys < trial).to(tl.int32), axis=0)
        found = tl.where(num_before < count, trial, found)
    return found


@triton.jit
def keep(values, is_kept, to, num_kept, size: tl.constexpr):
    """Store those that are kept one after the other, behind `num_kept`, and `LAST_KEY` in what remains of `size`."""
    place = num_kept + tl.cumsum(is_kept.to(tl.int32), axis=0) - 1
    rest = tl.arange(0, size)
    tl.store(to + place, values, mask=is_kept)
    num_kept += tl.sum(is_kept.to(tl.int32), axis=0)
    tl.store(to + rest, tl.full([size], LAST_KEY, tl.int64), mask=rest >= num_kept)
    tl.debug_barrier()
    return num_kept


@triton.jit
def is_among(tokens, ids, count):
    """Which tokens are among `count` ids."""
    found = tokens < 0
    for at in range(count):
        found = found | (tokens == tl.load(ids + at))
    return found


@triton.jit
def normalise(maxima, sums, num_blocks, scores, row, normal, blocks: tl.constexpr):
    """Write what is subtracted from a row's logits. Returns the row's score, -inf if it ends here.

    That is a row that may take nothing, or has no number among its logits.
    """
    block = tl.arange(0, blocks)
    most = tl.load(maxima + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
    parts = tl.load(sums + row * num_blocks + block, mask=block < num_blocks, other=0.0)
    highest = tl.max(most, axis=0)
    total = tl.sum(parts * tl.exp(tl.where(most == float("-inf"), 0.0, most - highest)), axis=0)
    tl.store(normal, highest)
    tl.store(normal + 1, tl.where(total > 0, tl.log(total), float("inf")))
    tl.debug_barrier()
    return tl.where(total > 0, tl.load(scores + row), float("-inf"))


@triton.jit
def logprobs_of(values, normal, tokens, vocab_size, barred, num_barred):
    """Log-probabilities of a row's tokens, as torch subtracts; -inf for what it may not take, or if it ends here."""
    logit = tl.load(values + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    highest, rest = tl.load(normal), tl.load(normal + 1)
    logprob = tl.where(is_among(tokens, barred, num_barred), float("-inf"), logit - highest - rest)
    return tl.where(rest < float("inf"), logprob, float("-inf"))


@triton.jit(do_not_specialize=["vocab_size", "num_barred"], do_not_specialize_on_alignment=["index"])
def _tile_max(
    logits, index, stride, vocab_size, barred, num_barred, best, maxima, sums, tiles: tl.constexpr, tile: tl.constexpr
):  # fmt: skip
    """See `Tiles`: a program per row and block."""
    row, block, num_blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = block * tiles * tile + tl.arange(0, tiles * tile)
    values = logits + tl.load(index + row) * stride
    logit = tl.load(values + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    highest = tl.max(logit, axis=0)
    total = tl.sum(tl.exp(logit - tl.where(highest == float("-inf"), 0.0, highest)), axis=0)
    at = row * num_blocks + block
    tl.store(maxima + at, highest)
    tl.store(sums + at, total)
    allowed = tl.where(is_among(token, barred, num_barred), float("-inf"), logit)
    of_tiles = tl.max(tl.reshape(allowed, [tiles, tile]), axis=1)
    tl.store(best + at.to(tl.int64) * tiles + tl.arange(0, tiles), of_tiles)


@triton.jit(
    do_not_specialize=["vocab_size", "num_barred", "num_blocks", "num_rows", "count"],
    do_not_specialize_on_alignment=["index", "scores"],
)
def _rank_rows(
    logits, index, stride, vocab_size, barred, num_barred, best, maxima, sums, num_blocks, scores, num_rows, count,
    keys, normal, blocks: tl.constexpr, tiles: tl.constexpr, tile: tl.constexpr, num_bits: tl.constexpr,
    kept: tl.constexpr,
):  # fmt: skip
    """See `rank_rows`: a program per row."""
    row = tl.program_id(0)
    normal += 2 * row
    score = normalise(maxima, sums, num_blocks, scores, row, normal, blocks)

    number = tl.arange(0, tiles)
    num_tiles = num_blocks * (tiles // blocks)
    values = logits + tl.load(index + row) * stride
    is_tile = number * tile < vocab_size
    highest_of_tile = tl.load(best + row.to(tl.int64) * num_tiles + number, mask=is_tile, other=float("-inf"))
    reached = tl.where(score > float("-inf"), highest_of_tile - tl.load(normal) - tl.load(normal + 1), score) + score
    of_tiles = order_key(reached, number)
    keys += row.to(tl.int64) * kept
    is_kept = is_tile & (of_tiles <= cutoff(tl.where(is_tile, of_tiles, LAST_KEY), count, num_bits))
    keep(number.to(tl.int64), is_kept, keys, 0, kept)
    lane = tl.arange(0, kept * tile)
    token = tl.minimum(tl.load(keys + lane // tile), tiles).to(tl.int32) * tile + lane % tile
    tl.debug_barrier()

    exists = token < vocab_size
    logprob = logprobs_of(values, normal, token, vocab_size, barred, num_barred)
    of_tokens = tl.where(exists, order_key(logprob + score, token), LAST_KEY)
    is_kept = exists & (of_tokens <= cutoff(of_tokens, count, num_bits + TILE_BITS))
    keep(of_tokens + (row % num_rows).to(tl.int64) * vocab_size, is_kept, keys, 0, kept)
