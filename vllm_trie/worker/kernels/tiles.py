"""Each row's log-sum-exp and its best continuations, in two launches; `search.rank` has it in torch.

The first kernel reads the logits once. It keeps the maximum of every tile, and a maximum and a sum of exponentials of
every block. The second reads the best tiles again: as `search.rank` explains, the others cannot matter. Tokens that go
on and tokens that end hypotheses are ranked separately, however many there are. Most blocks have no tokens that end:
for these, classes are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_trie.search.constraints.stops import BARRED, ENDS, GOES_ON, StopConstraints
from vllm_trie.search.devices import NEVER, uploaded_for_search
from vllm_trie.search.filters import SearchFilters
from vllm_trie.search.rank import TILE
from vllm_trie.search.token_tables import cached_by_search_tokens
from vllm_trie.worker.kernels.order_keys import (
    LAST_KEY,
    NUM_SCORE_BITS,
    cutoff_in_kernel,
    keep_keys_in_kernel,
    nth_score_in_kernel,
    order_key_in_kernel,
)
from vllm_trie.worker.launches import cdiv, next_power_of_2

TILES = 64  # of a block
BLOCK = TILES * TILE  # tokens
NO_STOPS = StopConstraints()
MOST_TILES = 4096  # of a row; with more, a program would spill
MOST_PER_ROW = 128  # ranked continuations of a row; with more, a program would spill
TILE_BITS = tl.constexpr(TILE.bit_length() - 1)
GOING, ENDING, NOT_ALLOWED = tl.constexpr(GOES_ON), tl.constexpr(ENDS), tl.constexpr(BARRED)  # classes of tokens
ALLOWED = tl.constexpr(BARRED + 1)  # in place of a class: what goes on and what ends


class KernelLogits(NamedTuple):
    """Logits of R rows, at their addresses.

    Args:
        values: [N, V], of any floating point type.
        which: [R] int64.
        classes: [V] int8, see `StopConstraints.classes`.
        mixed: [B] int32, numbers from 1 on the blocks in which not all tokens go on; 0 for others.
        num_mixed: M, the number of these blocks, or more.
        temperature: Divides the logits.
        level: [V] int64, see `SearchInputs`.
    """

    values: torch.Tensor
    which: torch.Tensor
    classes: torch.Tensor
    mixed: torch.Tensor
    num_mixed: int
    temperature: float = 1.0
    level: torch.Tensor | None = None

    @staticmethod
    def of(values: torch.Tensor, which: torch.Tensor, stops: StopConstraints = NO_STOPS) -> KernelLogits:
        """Logits of rows that may end with, or may not take, the tokens in `stops`."""
        vocab_size, device, last = values.shape[1], values.device, stops.last_token_ids
        mixed = _mixed_blocks_for_kernels(last, vocab_size, device)
        return KernelLogits(values, which, stops.classes(vocab_size, device), mixed, min(len(last), len(mixed)))

    @property
    def arguments(self) -> tuple[torch.Tensor | float, ...]:
        """The arguments of kernels."""
        values = self.values
        return values, self.which, values.stride(0), values.shape[1], self.classes, self.mixed, float(self.temperature)


@cached_by_search_tokens
def _mixed_blocks_for_kernels(token_ids: tuple[int, ...], vocab_size: int, device: torch.device) -> torch.Tensor:
    """[B] int32, see `KernelLogits`: the blocks that have any of these tokens."""
    of_tokens, blocks = np.array(token_ids, dtype=np.int64), np.zeros(cdiv(vocab_size, BLOCK), dtype=np.int32)
    mixed = np.unique(of_tokens[(of_tokens >= 0) & (of_tokens < vocab_size)] // BLOCK)
    blocks[mixed] = np.arange(1, 1 + len(mixed))
    return uploaded_for_search(blocks, device)


class KernelTiles(NamedTuple):
    """What the first kernel finds: the maxima of each row's tiles; a maximum and a sum of each block.

    Empty where rows are normalised among few tokens. Kernels take all fields, or the first or last ones, in this order;
    the last three normalise rows.
    """

    of_logits: tuple[torch.Tensor | float, ...]  # the kernels' arguments for the logits, see `KernelLogits`
    going: torch.Tensor | None = None  # [R, B * TILES] float32, of what goes on
    ending: torch.Tensor | None = None  # [R, M * TILES] float32, of what ends, in mixed blocks
    num_mixed: int = 0  # M
    maxima: torch.Tensor | None = None  # [R, B] float32
    sums: torch.Tensor | None = None  # [R, B] float32, of exponentials of logits less the maximum
    num_blocks: int = 1  # B


class KernelKeys(NamedTuple):
    """The best continuations, in lists: what goes on, and what may finish."""

    keys: torch.Tensor  # [L, R, P] or [L, G, K] int64, of rows or groups; as in `search.rank`, then `NO_KEY`
    of_rows: torch.Tensor  # [R, 2 or more] float32, maximum, and log-sum-exp less it; inf where a row ends


class KernelRanking(NamedTuple):
    """How rows are ranked.

    Args:
        launch: Ranks, from tiles, scores [G, r] and, along a catalog, the rows' nodes.
        num_places: Places of each row: tokens, or possible children of a node. A key's place counts them row after row.
        kept: Keys of each row, unsorted; 0: those of a group are sorted.
    """

    launch: Callable[..., KernelKeys]
    num_places: int
    kept: int = 0


class RowRankingTask(NamedTuple):
    """What a ranking of rows must find.

    Args:
        num_best: Continuations to find of each row and list, at most `kept`.
        kept: Room for keys; a power of two.
        filters: Filters that `can_filter_in_kernels` accepts.
        lists: What is ranked separately: what goes on, and then what ends; or all together.
        among_best: What ends is left out unless fewer tokens of its row are better; 0: no bound; at most `kept`.
    """

    num_best: int
    kept: int
    filters: SearchFilters = SearchFilters()
    lists: tuple[int, ...] = (ALLOWED.value,)
    among_best: int = 0


BOTH = GOES_ON, ENDS  # lists


def launch_tile_maxima(logits: KernelLogits) -> KernelTiles:
    """Reads all logits once, for the maxima of tiles and the sums of blocks."""
    num_rows, num_blocks, num_mixed = len(logits.which), len(logits.mixed), logits.num_mixed
    floats = partial(torch.empty, dtype=torch.float32, device=logits.which.device)
    of_tiles = floats(num_rows, num_blocks * TILES), floats(num_rows, num_mixed * TILES), num_mixed
    of_blocks = floats(num_rows, num_blocks), floats(num_rows, num_blocks), num_blocks
    tiles = KernelTiles(logits.arguments, *of_tiles, *of_blocks)
    _tile_max_kernel[num_rows, num_blocks](
        *tiles.of_logits, *tiles[1:-1], tiles=TILES, tile=TILE, num_warps=WARPS_TO_READ
    )
    return tiles


class KernelRowRanking:
    """Finds the best continuations of each row; everything that depends on no logits is computed ahead.

    Args:
        wanted: What to find.
        vocab_size: Tokens of a row, V.
    """

    def __init__(self, wanted: RowRankingTask, vocab_size: int) -> None:
        self.num_lists, self.kept = len(wanted.lists), wanted.kept
        self._how = wanted.num_best, kernel_log_min_p(wanted.filters), wanted.lists[0], wanted.among_best
        self._sizes = kernel_sizes_to_rank(next_power_of_2(cdiv(vocab_size, BLOCK)), wanted.kept)
        self._num_warps = warps_to_rank(wanted.kept)

    def __call__(self, tiles: KernelTiles, scores: torch.Tensor) -> KernelKeys:
        """Ranks the continuations of R rows.

        Args:
            tiles: Of the rows.
            scores: [..., r] float32, R in all, of which r compete with each other.
        """
        num_all_rows, device = scores.numel(), scores.device
        keys = torch.empty(self.num_lists, num_all_rows, self.kept, dtype=torch.int64, device=device)
        normal = torch.empty(self.num_lists, num_all_rows, 2, dtype=torch.float32, device=device)
        _rank_rows_kernel[num_all_rows, self.num_lists](
            *tiles.of_logits, *tiles[1:], scores, scores.shape[-1], *self._how, keys, normal, **self._sizes,
            num_warps=self._num_warps,
        )  # fmt: skip
        return KernelKeys(keys, normal[0])


WARPS_TO_READ = 4


def kernels_rank_rows(count: int, vocab_size: int) -> bool:
    """Whether kernels rank this many tokens of each row alone; otherwise torch does."""
    return count <= MOST_PER_ROW and vocab_size <= MOST_TILES * TILE


def can_filter_in_kernels(filters: SearchFilters) -> bool:
    """Whether kernels apply these filters: those that need a row's maximum, but not its order."""
    return (filters.top_k, filters.top_p) == (0, 1.0)


def kernel_log_min_p(filters: SearchFilters) -> float:
    """How far below a row's best a log-probability may be: at most 0, or -inf."""
    return log(filters.min_p) if filters.min_p > 0 else NEVER


def kernel_sizes_to_rank(blocks: int, kept: int) -> dict[str, int]:
    """The sizes that `_rank_rows_kernel` is compiled for: rows of `blocks` blocks, with `kept` continuations each."""
    tiles = blocks * TILES
    num_bits = NUM_SCORE_BITS + tiles.bit_length() - 1
    return {"blocks": blocks, "tiles": tiles, "tile": TILE, "num_bits": num_bits, "kept": kept}


def warps_to_rank(kept: int) -> int:
    """Warps of a program of `_rank_rows_kernel`."""
    return 4 if kept <= 16 else 8 if kept <= 32 else 16


@triton.jit
def normalise_in_kernel(maxima, sums, num_blocks, scores, row, normal, blocks: tl.constexpr):
    """Writes what is subtracted from a row's logits, see `subtracted_in_kernel`."""
    block = tl.arange(0, blocks)
    most = tl.load(maxima + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
    parts = tl.load(sums + row * num_blocks + block, mask=block < num_blocks, other=0.0)
    highest = tl.max(most, axis=0)
    total = tl.sum(parts * tl.exp(tl.where(most == float("-inf"), 0.0, most - highest)), axis=0)
    return subtracted_in_kernel(highest, total, scores, row, normal)


@triton.jit
def subtracted_in_kernel(highest, total, scores, row, normal):
    """Writes what is subtracted from a row's logits. Returns the row's score, -inf if it ends here.

    A row ends here if it may take nothing, or has no number among its logits.

    Args:
        highest: The maximum of its logits.
        total: The sum of exponentials of its logits less `highest`.
    """
    tl.store(normal, highest)
    tl.store(normal + 1, tl.where(total > 0, tl.log(total), float("inf")))
    tl.debug_barrier()
    return tl.where(total > 0, tl.load(scores + row), float("-inf"))


@triton.jit
def logits_in_kernel(values, tokens, vocab_size, temperature):
    """Logits of a row's tokens, divided as in torch; -inf beyond the vocabulary."""
    logit = tl.load(values + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    if temperature != 1.0:
        logit = tl.div_rn(logit, temperature)
    return logit


@triton.jit
def normalised_in_kernel(values, normal, tokens, vocab_size, temperature):
    """Log-probabilities of a row's tokens of any class, subtracted as in torch; -inf if the row ends here."""
    highest, rest = tl.load(normal), tl.load(normal + 1)
    logit = logits_in_kernel(values, tokens, vocab_size, temperature)
    return tl.where(rest < float("inf"), logit - highest - rest, float("-inf"))


@triton.jit
def logprobs_in_kernel(values, normal, tokens, vocab_size, classes, temperature, wanted):
    """`normalised_in_kernel` with -inf for tokens of other classes than `wanted`, a class or `ALLOWED`."""
    logprob = normalised_in_kernel(values, normal, tokens, vocab_size, temperature)
    own = tl.load(classes + tokens, mask=tokens < vocab_size, other=NOT_ALLOWED).to(tl.int32)
    is_wanted = (own == wanted) | ((wanted == ALLOWED) & (own != NOT_ALLOWED))
    return tl.where(is_wanted, logprob, float("-inf"))


@triton.jit(do_not_specialize=["vocab_size", "num_mixed"], do_not_specialize_on_alignment=["index"])
def _tile_max_kernel(
    logits, index, stride, vocab_size, classes, mixed, temperature, going, ending, num_mixed, maxima, sums, tiles:
    tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """See `KernelTiles`: a program per row and block."""
    row, block, num_blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = block * tiles * tile + tl.arange(0, tiles * tile)
    values = logits + tl.load(index + row) * stride
    logit = logits_in_kernel(values, token, vocab_size, temperature)
    of_mixed = tl.load(mixed + block)
    own = tl.load(classes + token, mask=token < tl.where(of_mixed > 0, vocab_size, 0), other=GOING)
    highest = tl.max(logit, axis=0)
    total = tl.sum(tl.exp(logit - tl.where(highest == float("-inf"), 0.0, highest)), axis=0)
    at = row * num_blocks + block
    tl.store(maxima + at, highest)
    tl.store(sums + at, total)
    number = tl.arange(0, tiles)
    goes_on = tl.where(own == GOING, logit, float("-inf"))
    tl.store(going + at.to(tl.int64) * tiles + number, tl.max(tl.reshape(goes_on, [tiles, tile]), axis=1))
    if of_mixed > 0:
        ends = tl.where(own == ENDING, logit, float("-inf"))
        ending += (row.to(tl.int64) * num_mixed + of_mixed - 1) * tiles
        tl.store(ending + number, tl.max(tl.reshape(ends, [tiles, tile]), axis=1))


@triton.jit
def tile_maxima_in_kernel(
    going, ending, num_mixed, mixed, row, num_blocks, vocab_size, normal, wanted, blocks: tl.constexpr, tiles:
    tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """[tiles], the best log-probabilities of a class, or of `ALLOWED`, in each tile of a row; see `KernelTiles`."""
    per_block: tl.constexpr = tiles // blocks
    number = tl.arange(0, tiles)
    num_going, num_ending = tl.where(wanted == ENDING, 0, vocab_size), tl.where(wanted == GOING, 0, vocab_size)
    goes_on = tl.load(
        going + row * num_blocks * per_block + number, mask=number * tile < num_going, other=float("-inf")
    )
    of_mixed = tl.load(mixed + number // per_block, mask=number * tile < num_ending, other=0)
    of_mixed = tl.where(of_mixed > 0, (row * num_mixed + of_mixed - 1) * per_block + number % per_block, -1)
    ends = tl.load(ending + of_mixed, mask=of_mixed >= 0, other=float("-inf"))
    return tl.maximum(goes_on, ends) - tl.load(normal) - tl.load(normal + 1)


@triton.jit
def listed_in_kernel(score, place, exists, wanted):
    """Order keys of what exists. Which impossible ones fill up a ranking matters only for what ends: there, none do."""
    key = tl.where(exists, order_key_in_kernel(score, place), LAST_KEY)
    return tl.where((score == float("-inf")) & (wanted == ENDING), LAST_KEY, key)


@triton.jit
def tile_tokens_in_kernel(of_tiles, count, keys, num_bits, tile: tl.constexpr, kept: tl.constexpr):
    """The tokens [kept * tile] in the first `count` tiles by order keys; beyond the vocabulary if there are fewer.

    Args:
        keys: [kept], scratch space.
    """
    number = tl.arange(0, of_tiles.shape[0])
    keep_keys_in_kernel(number.to(tl.int64), of_tiles <= cutoff_in_kernel(of_tiles, count, num_bits), keys, 0, kept)
    lane = tl.arange(0, kept * tile)
    tokens = tl.minimum(tl.load(keys + lane // tile), of_tiles.shape[0]).to(tl.int32) * tile + lane % tile
    tl.debug_barrier()
    return tokens


@triton.jit(
    do_not_specialize=["vocab_size", "num_mixed", "num_blocks", "num_rows", "count", "first_list", "among_best"],
    do_not_specialize_on_alignment=["index", "scores"],
)
def _rank_rows_kernel(
    logits, index, stride, vocab_size, classes, mixed, temperature, going, ending, num_mixed, maxima, sums, num_blocks,
    scores, num_rows, count, log_min_p, first_list, among_best, keys, normal, blocks: tl.constexpr, tiles: tl.constexpr,
    tile: tl.constexpr, num_bits: tl.constexpr, kept: tl.constexpr,
):  # fmt: skip
    """See `KernelRowRanking`: a program per row and list."""
    row, wanted = tl.program_id(0), first_list + tl.program_id(1)
    at = (tl.program_id(1) * tl.num_programs(0) + row).to(tl.int64)
    keys, normal = keys + at * kept, normal + 2 * at
    score = normalise_in_kernel(maxima, sums, num_blocks, scores, row, normal, blocks)

    number = tl.arange(0, tiles)
    of_tiles = going, ending, num_mixed, mixed, row, num_blocks, vocab_size, normal
    least = tl.full([], float("-inf"), tl.float32)
    is_by_rank = (wanted == ENDING) & (among_best > 0) & (score > float("-inf"))
    if is_by_rank | (log_min_p > float("-inf")):
        of_all = tile_maxima_in_kernel(*of_tiles, ALLOWED, blocks, tiles, tile)
        least = tl.max(of_all, axis=0) + log_min_p
        if is_by_rank:
            key_of_tiles = listed_in_kernel(of_all, number, number * tile < vocab_size, ALLOWED)
            best_token = tile_tokens_in_kernel(key_of_tiles, among_best, keys, num_bits, tile, kept)
            values = logits + tl.load(index + row) * stride
            of_best = logprobs_in_kernel(values, normal, best_token, vocab_size, classes, temperature, ALLOWED)
            of_best = tl.where(best_token < vocab_size, of_best, float("nan"))
            least = tl.maximum(least, nth_score_in_kernel(of_best, among_best))

    of_list = tile_maxima_in_kernel(*of_tiles, wanted, blocks, tiles, tile)
    of_list = tl.where(of_list < least, float("-inf"), of_list)
    reached = tl.where(score > float("-inf"), of_list, score) + score
    reached = listed_in_kernel(reached, number, number * tile < vocab_size, wanted)
    token = tile_tokens_in_kernel(reached, count, keys, num_bits, tile, kept)
    values = logits + tl.load(index + row) * stride
    logprob = logprobs_in_kernel(values, normal, token, vocab_size, classes, temperature, wanted)
    logprob = tl.where(logprob < least, float("-inf"), logprob)
    of_tokens = listed_in_kernel(logprob + score, token, token < vocab_size, wanted)
    is_kept = of_tokens <= cutoff_in_kernel(of_tokens, count, num_bits + TILE_BITS)
    keep_keys_in_kernel(of_tokens + (row % num_rows).to(tl.int64) * vocab_size, is_kept, keys, 0, kept)
