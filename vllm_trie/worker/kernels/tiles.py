"""Each row's log-sum-exp and its best continuations, in two launches; `search.rank` has it in torch.

The first kernel reads the logits once. It keeps the maximum of every tile, and a maximum and a sum of exponentials of
every block. The second one reads again what lies in the best tiles: as `search.rank` explains, the rest has no say.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_trie.search.devices import NEVER, constant
from vllm_trie.search.filters import LogitsFilters
from vllm_trie.search.rank import TILE
from vllm_trie.worker.kernels.order_keys import LAST_KEY, NUM_SCORE_BITS, cutoff, is_among, keep, order_key
from vllm_trie.worker.sizes import cdiv, next_power_of_2

TILES = 64  # of a block
BLOCK = TILES * TILE  # tokens
MOST_TILES = 4096  # of a row; of more a program would spill
MOST_PER_ROW = 128  # continuations of a row that are ranked, likewise
TILE_BITS = tl.constexpr(TILE.bit_length() - 1)


class RowLogits(NamedTuple):
    """Logits of R rows, where they are.

    Args:
        values: [N, V], of any floating point type.
        which: [R] int64.
        barred: Tokens that no row may take.
        temperature: That divides them.
    """

    values: torch.Tensor
    which: torch.Tensor
    barred: tuple[int, ...] = ()
    temperature: float = 1.0

    @property
    def arguments(self) -> tuple[torch.Tensor | float, ...]:
        """What kernels take of them."""
        values, num_barred = self.values, len(self.barred)
        barred = constant(self.barred, values.device)
        return values, self.which, values.stride(0), values.shape[1], barred, num_barred, float(self.temperature)


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
    own: torch.Tensor  # [R, S] float32, scores with each of the tokens that were asked for


class Wanted(NamedTuple):
    """What rows are ranked for.

    Args:
        num_best: Continuations of each row, as many as are kept at most.
        kept: Keys that there is room for; a power of two.
        filters: Of those, `can_filter` says which.
        own_tokens: Whose scores are asked for, too, in each row.
        own_most: They count as -inf unless fewer tokens than this are better.
    """

    num_best: int
    kept: int
    filters: LogitsFilters = LogitsFilters()
    own_tokens: tuple[int, ...] = ()
    own_most: int = 0


def tiles_of(logits: RowLogits) -> Tiles:
    """Read all logits once."""
    num_rows, vocab_size = len(logits.which), logits.values.shape[1]
    num_blocks, device = cdiv(vocab_size, BLOCK), logits.which.device
    best = torch.empty(num_rows, num_blocks * TILES, dtype=torch.float32, device=device)
    maxima, sums = (torch.empty(num_rows, num_blocks, dtype=torch.float32, device=device) for _ in range(2))
    _tile_max[num_rows, num_blocks](
        *logits.arguments, best, maxima, sums, tiles=TILES, tile=TILE, num_warps=WARPS_TO_READ
    )
    return Tiles(best, maxima, sums)


def rank_rows(logits: RowLogits, tiles: Tiles, scores: torch.Tensor, num_rows: int, wanted: Wanted) -> RowKeys:
    """The best continuations of each row.

    Args:
        logits: Of R rows.
        tiles: Theirs.
        scores: [R] float32, or of any shape with as many.
        num_rows: That compete with each other, r; R is a multiple.
        wanted: How many.
    """
    count, kept, filters, own_tokens, own_most = wanted
    num_own, device = len(own_tokens), scores.device
    keys = torch.empty(len(logits.which), kept, dtype=torch.int64, device=device)
    normal, own = (torch.empty(len(keys), size, dtype=torch.float32, device=device) for size in (2, num_own))
    sizes = sizes_to_rank(next_power_of_2(tiles.maxima.shape[1]), kept)
    of_own = constant(own_tokens, device), num_own, own_most, own
    _rank_rows[len(keys),](
        *logits.arguments, *tiles.arguments, scores, num_rows, count, log_min_p(filters), *of_own, keys, normal,
        **sizes, num_warps=warps_to_rank(kept),
    )  # fmt: skip
    return RowKeys(keys, normal, own)


WARPS_TO_READ = 4


def can_filter(filters: LogitsFilters) -> bool:
    """Whether kernels filter so: what needs a row's maximum, and nothing that needs its order."""
    return (filters.top_k, filters.top_p) == (0, 1.0)


def log_min_p(filters: LogitsFilters) -> float:
    """How far below a row's best a log-probability may be: at most 0, or -inf."""
    return log(filters.min_p) if filters.min_p > 0 else NEVER


def sizes_to_rank(blocks: int, kept: int) -> dict[str, int]:
    """What `_rank_rows` is compiled for: rows of so many blocks, and continuations that are kept of each."""
    tiles = blocks * TILES
    num_bits = NUM_SCORE_BITS + tiles.bit_length() - 1
    return {"blocks": blocks, "tiles": tiles, "tile": TILE, "num_bits": num_bits, "kept": kept}


def warps_to_rank(kept: int) -> int:
    """Warps of a program of `_rank_rows`."""
    return 4 if kept <= 16 else 8 if kept <= 32 else 16


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
def logits_of(values, tokens, vocab_size, temperature):
    """Logits of a row's tokens, as torch divides; -inf beyond the vocabulary."""
    logit = tl.load(values + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    if temperature != 1.0:
        logit = tl.div_rn(logit, temperature)
    return logit


@triton.jit
def logprobs_of(values, normal, tokens, vocab_size, barred, num_barred, temperature):
    """Log-probabilities of a row's tokens, as torch subtracts; -inf for what it may not take, or if it ends here."""
    logit = logits_of(values, tokens, vocab_size, temperature)
    highest, rest = tl.load(normal), tl.load(normal + 1)
    logprob = tl.where(is_among(tokens, barred, num_barred), float("-inf"), logit - highest - rest)
    return tl.where(rest < float("inf"), logprob, float("-inf"))


@triton.jit(do_not_specialize=["vocab_size", "num_barred"], do_not_specialize_on_alignment=["index"])
def _tile_max(
    logits, index, stride, vocab_size, barred, num_barred, temperature, best, maxima, sums, tiles: tl.constexpr, tile:
    tl.constexpr,
):  # fmt: skip
    """See `Tiles`: a program per row and block."""
    row, block, num_blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = block * tiles * tile + tl.arange(0, tiles * tile)
    values = logits + tl.load(index + row) * stride
    logit = logits_of(values, token, vocab_size, temperature)
    highest = tl.max(logit, axis=0)
    total = tl.sum(tl.exp(logit - tl.where(highest == float("-inf"), 0.0, highest)), axis=0)
    at = row * num_blocks + block
    tl.store(maxima + at, highest)
    tl.store(sums + at, total)
    allowed = tl.where(is_among(token, barred, num_barred), float("-inf"), logit)
    of_tiles = tl.max(tl.reshape(allowed, [tiles, tile]), axis=1)
    tl.store(best + at.to(tl.int64) * tiles + tl.arange(0, tiles), of_tiles)


@triton.jit
def num_better_than(
    own, most, values, normal, best, vocab_size, barred, num_barred, temperature, num_blocks, tiles: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """How many tokens of a row are better than log-probability `own`, `most` or more if it is not fewer.

    Most blocks need no look: no tile in them is better.
    """
    num_better, block = 0, 0
    while (block < num_blocks) & (num_better < most):
        of_tiles = tl.load(best + block * tiles + tl.arange(0, tiles)) - tl.load(normal) - tl.load(normal + 1)
        if tl.max((of_tiles > own).to(tl.int32), axis=0) > 0:
            token = block * tiles * tile + tl.arange(0, tiles * tile)
            logprob = logprobs_of(values, normal, token, vocab_size, barred, num_barred, temperature)
            num_better += tl.sum((logprob > own).to(tl.int32), axis=0)
        block += 1
    return num_better


@triton.jit(
    do_not_specialize=["vocab_size", "num_barred", "num_blocks", "num_rows", "count", "num_own", "own_most"],
    do_not_specialize_on_alignment=["index", "scores"],
)
def _rank_rows(
    logits, index, stride, vocab_size, barred, num_barred, temperature, best, maxima, sums, num_blocks, scores,
    num_rows, count, log_min_p, own_tokens, num_own, own_most, own, keys, normal, blocks: tl.constexpr, tiles:
    tl.constexpr, tile: tl.constexpr, num_bits: tl.constexpr, kept: tl.constexpr,
):  # fmt: skip
    """See `rank_rows`: a program per row."""
    row = tl.program_id(0)
    normal += 2 * row
    score = normalise(maxima, sums, num_blocks, scores, row, normal, blocks)

    number = tl.arange(0, tiles)
    num_tiles = num_blocks * (tiles // blocks)
    values, best = logits + tl.load(index + row) * stride, best + row.to(tl.int64) * num_tiles
    is_tile = number * tile < vocab_size
    highest_of_tile = tl.load(best + number, mask=is_tile, other=float("-inf"))
    highest_of_tile = highest_of_tile - tl.load(normal) - tl.load(normal + 1)
    least = tl.max(highest_of_tile, axis=0) + log_min_p
    highest_of_tile = tl.where(highest_of_tile < least, float("-inf"), highest_of_tile)
    reached = tl.where(score > float("-inf"), highest_of_tile, score) + score
    of_tiles = order_key(reached, number)
    keys += row.to(tl.int64) * kept
    is_kept = is_tile & (of_tiles <= cutoff(tl.where(is_tile, of_tiles, LAST_KEY), count, num_bits))
    keep(number.to(tl.int64), is_kept, keys, 0, kept)
    lane = tl.arange(0, kept * tile)
    token = tl.minimum(tl.load(keys + lane // tile), tiles).to(tl.int32) * tile + lane % tile
    tl.debug_barrier()

    exists = token < vocab_size
    logprob = logprobs_of(values, normal, token, vocab_size, barred, num_barred, temperature)
    logprob = tl.where(logprob < least, float("-inf"), logprob)
    of_tokens = tl.where(exists, order_key(logprob + score, token), LAST_KEY)
    is_kept = exists & (of_tokens <= cutoff(of_tokens, count, num_bits + TILE_BITS))
    keep(of_tokens + (row % num_rows).to(tl.int64) * vocab_size, is_kept, keys, 0, kept)

    for at in range(num_own):
        own_token = tl.load(own_tokens + at).to(tl.int32)
        own_logprob = logprobs_of(values, normal, own_token, vocab_size, barred, num_barred, temperature)
        num_better = num_better_than(
            own_logprob, own_most, values, normal, best, vocab_size, barred, num_barred, temperature, num_blocks,
            tiles // blocks, tile,
        )  # fmt: skip
        is_best = (own_logprob >= least) & (num_better < own_most)
        tl.store(own + row * num_own + at, tl.where(is_best, own_logprob + score, float("-inf")))
