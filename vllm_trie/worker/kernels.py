"""Triton kernels of selection and permutation; `device_step` and `forks` have in torch what each must equal.

Nothing here waits for the device, and what a kernel computes depends on no schedule: no float atomics, no
autotuning. So ranks of tensor parallelism agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from vllm_trie.worker.reorder import RowReorder, Tables
    from vllm_trie.worker.kv_blocks import Segments

TILE_SIZE = 4096  # logits that one program reads; fixed, so that a row's sum is the same in any batch
COPY_TILE = 1024  # words, or table entries, that one program copies at a time
PAIRS_PER_THREAD = 32  # (slot, candidate) pairs that a thread of `_settle` compares at a time; more would spill
WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
INDEX_BITS = tl.constexpr(31)  # of a continuation within its group; the rest of a key is its score
INDEX_MASK = tl.constexpr((1 << 31) - 1)


def run_on(device: torch.device) -> bool:
    """Whether kernels do the work on this device; elsewhere torch does."""
    return device.type == "cuda"


def continuation_keys(
    logits: torch.Tensor,
    places: torch.Tensor,
    scores: torch.Tensor,
    temperature: float,
    masked_token_ids: torch.Tensor,
) -> torch.Tensor:
    """What `device_step.continuation_keys` returns, read from the logits once for their sum and once for the keys.

    Args:
        logits: [R, V] of any floating point type, rows may lie apart.
        places: [G, r] int64, which rows.
        scores: [G, r] float32.
        temperature: Divides the logits.
        masked_token_ids: [S] int64, tokens that may not be taken.

    Returns:
        [G, r * V] int64.
    """
    (num_groups, rows_per_group), vocab_size = places.shape, logits.shape[1]
    assert logits.stride(1) == 1, "tokens of a row of logits must lie side by side"
    num_rows, num_tiles = num_groups * rows_per_group, triton.cdiv(vocab_size, TILE_SIZE)
    places, scores = places.contiguous(), scores.contiguous()
    maxima, sums = torch.empty(2, num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    keys = torch.empty(num_groups, rows_per_group * vocab_size, dtype=torch.int64, device=logits.device)
    scales, grid = temperature != 1.0, (num_rows, num_tiles)
    _partial_softmax[grid](
        logits,
        logits.stride(0),
        places,
        temperature,
        maxima,
        sums,
        vocab_size,
        num_tiles,
        scales=scales,
        tile_size=TILE_SIZE,
        num_warps=8,
    )
    _continuation_keys[grid](
        logits,
        logits.stride(0),
        places,
        temperature,
        scores,
        maxima,
        sums,
        masked_token_ids,
        len(masked_token_ids),
        keys,
        rows_per_group,
        vocab_size,
        num_tiles,
        scales=scales,
        tile_size=TILE_SIZE,
        tiles=triton.next_power_of_2(num_tiles),
        num_warps=8,
    )
    return keys


def settle(
    keys: torch.Tensor, num_rows: int, vocab_size: int, stop_token_ids: torch.Tensor, width: int, is_last: bool
) -> torch.Tensor:
    """What `device_step.settle` packs, [7, G, b] int32, by one program per group.

    Args:
        keys: [G, K] int64, the best continuations in order.
        num_rows: Rows per group that they continue: 1, or b.
        vocab_size: V.
        stop_token_ids: [S] int64.
        width: Beams per group, b.
        is_last: The length is reached.
    """
    num_groups, num_ranked = keys.shape
    slots = triton.next_power_of_2(width)
    packed = torch.empty(7, num_groups, width, dtype=torch.int32, device=keys.device)
    _settle[num_groups,](
        keys.contiguous(),
        num_ranked,
        stop_token_ids,
        len(stop_token_ids),
        packed,
        num_rows,
        vocab_size,
        width,
        int(is_last),
        slots=slots,
        chunk=candidates_at_a_time(slots),
        num_warps=warps_to_settle(slots),
    )
    return packed


def warps_to_settle(slots: int) -> int:
    """Warps of a program of `_settle`."""
    return 4 if slots <= 64 else 8 if slots <= 256 else 16


def candidates_at_a_time(slots: int) -> int:
    """Candidates that a program of `_settle` compares with all slots at a time."""
    return min(max(PAIRS_PER_THREAD * 32 * warps_to_settle(slots) // slots, 16), 32)


def copy_histories(rows: RowReorder, tokens: torch.Tensor, tables: Tables) -> None:
    """What `reorder.copy_histories` does: tokens beyond the common ones, and full blocks of all tables.

    Args:
        rows: R of them.
        tokens: [slots, length] int32.
        tables: Of all KV cache groups.
    """
    _copy_histories[len(rows.slots), 1 + len(tables.tables)](
        rows.slots,
        rows.sources,
        rows.num_common,
        rows.num_tokens,
        tokens,
        tokens.stride(0),
        tables.pointers,
        tables.strides,
        tables.sizes,
        tile_size=COPY_TILE,
        num_warps=4,
    )


def copy_tails(rows: RowReorder, tables: Tables, segments: Segments) -> None:
    """What `reorder.copy_tails` does: the content of partly filled tail blocks, in all layers.

    Args:
        rows: R of them.
        tables: Of all KV cache groups.
        segments: Where blocks lie, layer by layer.
    """
    num_tables, num_tiles = len(tables.tables), triton.cdiv(segments.most_words, COPY_TILE)
    _copy_tails[len(rows.slots) * num_tables, len(segments.pointers), num_tiles](
        rows.slots,
        rows.sources,
        rows.num_tokens,
        tables.pointers,
        tables.strides,
        tables.sizes,
        num_tables,
        segments.pointers,
        segments.strides,
        segments.words,
        word=WORDS[segments.word_bytes],
        tile_size=COPY_TILE,
        num_warps=4,
    )


@triton.jit
def _scaled(logits, row_stride, places, row, column, vocab_size, temperature, scales: tl.constexpr):
    """One tile of a row of logits as float32, -inf beyond its end."""
    place = tl.load(places + row)
    values = tl.load(logits + place * row_stride + column, mask=column < vocab_size, other=float("-inf"))
    values = values.to(tl.float32)
    if scales:
        values = tl.div_rn(values, tl.zeros_like(values) + temperature)
    return values


@triton.jit
def _partial_softmax(
    logits,
    row_stride,
    places,
    temperature,
    maxima,  # [rows, tiles]
    sums,  # [rows, tiles], of the exponentials of differences from the maximum
    vocab_size,
    num_tiles,
    scales: tl.constexpr,
    tile_size: tl.constexpr,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    column = tile * tile_size + tl.arange(0, tile_size)
    values = _scaled(logits, row_stride, places, row, column, vocab_size, temperature, scales)
    largest = tl.max(values, axis=0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(maxima + row * num_tiles + tile, largest)
    tl.store(sums + row * num_tiles + tile, tl.sum(tl.exp(values - base), axis=0))


@triton.jit(do_not_specialize=["rows_per_group", "num_masked"])
def _continuation_keys(
    logits,
    row_stride,
    places,
    temperature,
    scores,  # [rows]
    maxima,
    sums,
    masked_token_ids,
    num_masked,
    keys,  # [rows, V]
    rows_per_group,
    vocab_size,
    num_tiles,
    scales: tl.constexpr,
    tile_size: tl.constexpr,
    tiles: tl.constexpr,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    of_tiles = tl.arange(0, tiles)
    largest_of = tl.load(maxima + row * num_tiles + of_tiles, mask=of_tiles < num_tiles, other=float("-inf"))
    sum_of = tl.load(sums + row * num_tiles + of_tiles, mask=of_tiles < num_tiles, other=0.0)
    largest = tl.max(largest_of, axis=0)
    may_take_some = largest != float("-inf")
    base = tl.where(may_take_some, largest, 0.0)
    mass = tl.sum(sum_of * tl.exp(largest_of - base), axis=0)
    log_mass = tl.log(tl.where(may_take_some, mass, 1.0))

    column = tile * tile_size + tl.arange(0, tile_size)
    values = _scaled(logits, row_stride, places, row, column, vocab_size, temperature, scales)
    logprobs = values - base - log_mass
    for masked in range(num_masked):
        logprobs = tl.where(column == tl.load(masked_token_ids + masked), float("-inf"), logprobs)
    total = logprobs + tl.load(scores + row)
    total = tl.where(total == 0.0, 0.0, total)  # -0.0 is as good
    bits = total.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers they compare as the floats do
    index = (row % rows_per_group) * vocab_size + column
    key = (ordered.to(tl.int64) << INDEX_BITS) | (index.to(tl.int64) ^ INDEX_MASK)
    tl.store(keys + row.to(tl.int64) * vocab_size + column, key, mask=column < vocab_size)


@triton.jit
def _ranked(keys, rank, num_ranked, stop_token_ids, num_stops, vocab_size):
    """Parents, tokens, scores and stops of the candidates at `rank`; zeros, and -inf, where there are none."""
    exists = rank < num_ranked
    key = tl.load(keys + rank, mask=exists, other=0)
    index = ((key & INDEX_MASK) ^ INDEX_MASK).to(tl.int32)
    ordered = (key >> INDEX_BITS).to(tl.int32)
    scores = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    parents = tl.where(exists, index // vocab_size, 0)
    tokens = tl.where(exists, index % vocab_size, 0)
    stops = rank < 0
    for at in range(num_stops):
        stops = stops | (tokens == tl.load(stop_token_ids + at))
    return parents, tokens, tl.where(exists, scores, float("-inf")), stops & exists


@triton.jit
def _living(scores, stops, num_alive, width):
    """Which candidates become beams: the first `width` that go on."""
    lives = (scores > float("-inf")) & (stops == 0)
    return lives & (num_alive + tl.cumsum(lives.to(tl.int32), axis=0) <= width)


@triton.jit(do_not_specialize=["num_ranked", "num_stops", "num_rows", "width", "is_last"])
def _settle(
    keys,  # [G, K]
    num_ranked,
    stop_token_ids,
    num_stops,
    packed,  # [7, G, b]
    num_rows,
    vocab_size,
    width,
    is_last,
    slots: tl.constexpr,
    chunk: tl.constexpr,
):
    group, num_groups = tl.program_id(0), tl.num_programs(0)
    keys += group.to(tl.int64) * num_ranked
    slot = tl.arange(0, slots)

    # Each slot's first child. As a rule `width` candidates live among little more than as many.
    chosen = tl.zeros([slots], tl.int32) + num_ranked
    start = 0
    num_alive = 0
    while (start < num_ranked) & (num_alive < width):
        rank = start + tl.arange(0, chunk)
        parents, _, scores, stops = _ranked(keys, rank, num_ranked, stop_token_ids, num_stops, vocab_size)
        lives = _living(scores, stops, num_alive, width)
        is_child = (parents[None, :] == slot[:, None]) & lives[None, :]
        chosen = tl.minimum(chosen, tl.min(tl.where(is_child, rank[None, :], num_ranked), axis=1))
        num_alive += tl.sum(lives.to(tl.int32), axis=0)
        start += chunk

    # The n-th of the other children takes the n-th dead slot.
    first_child = chosen
    is_dead = (first_child == num_ranked) & (slot < width)
    nth_dead = tl.where(is_dead, tl.cumsum(is_dead.to(tl.int32), axis=0), 0)
    start = 0
    num_alive = 0
    num_others = 0
    while (start < num_ranked) & (num_alive < width):
        rank = start + tl.arange(0, chunk)
        _, _, scores, stops = _ranked(keys, rank, num_ranked, stop_token_ids, num_stops, vocab_size)
        lives = _living(scores, stops, num_alive, width)
        is_first = tl.max((first_child[:, None] == rank[None, :]).to(tl.int32), axis=0)
        others = (lives & (is_first == 0)).to(tl.int32)
        nth_other = tl.where(others == 1, num_others + tl.cumsum(others, axis=0), -1)
        takes = nth_dead[:, None] == nth_other[None, :]
        chosen = tl.minimum(chosen, tl.min(tl.where(takes, rank[None, :], num_ranked), axis=1))
        num_alive += tl.sum(lives.to(tl.int32), axis=0)
        num_others += tl.sum(others, axis=0)
        start += chunk

    parents, tokens, scores, _ = _ranked(keys, chosen, num_ranked, stop_token_ids, 0, vocab_size)
    parents = tl.where(chosen < num_ranked, parents, tl.minimum(slot, num_rows - 1))
    field = num_groups * width
    at, is_slot = packed + group * width + slot, slot < width
    tl.store(at, parents, mask=is_slot)
    tl.store(at + field, tokens, mask=is_slot)
    tl.store(at + 2 * field, scores.to(tl.int32, bitcast=True), mask=is_slot)

    parents, tokens, scores, stops = _ranked(keys, slot, num_ranked, stop_token_ids, num_stops, vocab_size)
    is_finished = (stops | (is_last != 0)) & (scores > float("-inf"))
    tl.store(at + 3 * field, parents, mask=is_slot)
    tl.store(at + 4 * field, tokens, mask=is_slot)
    tl.store(at + 5 * field, scores.to(tl.int32, bitcast=True), mask=is_slot)
    tl.store(at + 6 * field, is_finished.to(tl.int32), mask=is_slot)


@triton.jit
def _copy(source, destination, start, end, tile_size: tl.constexpr):
    for at in range(start, end, tile_size):
        index = at + tl.arange(0, tile_size)
        tl.store(destination + index, tl.load(source + index, mask=index < end), mask=index < end)


@triton.jit
def _copy_histories(
    slots,  # [R]
    sources,  # [R]
    num_common,  # [R]
    num_tokens,  # [R]
    tokens,  # [slots, length]
    tokens_stride,
    table_pointers,
    table_strides,
    block_sizes,
    tile_size: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    source, slot = tl.load(sources + row), tl.load(slots + row)
    if source == slot:
        return
    length = tl.load(num_tokens + row)
    if part == 0:
        source_row, own_row = tokens + source * tokens_stride, tokens + slot * tokens_stride
        _copy(source_row, own_row, tl.load(num_common + row), length, tile_size)
    else:
        table = tl.load(table_pointers + part - 1).to(tl.pointer_type(tl.int32))
        stride = tl.load(table_strides + part - 1)
        _copy(table + source * stride, table + slot * stride, 0, length // tl.load(block_sizes + part - 1), tile_size)


@triton.jit(do_not_specialize=["num_tables"])
def _copy_tails(
    slots,  # [R]
    sources,  # [R]
    num_tokens,  # [R]
    table_pointers,
    table_strides,
    block_sizes,
    num_tables,
    pointers,  # [segments]
    strides,  # [segments], from block to block, in words
    words,  # [segments], of a block
    word: tl.constexpr,
    tile_size: tl.constexpr,
):
    row, of_table = tl.program_id(0) // num_tables, tl.program_id(0) % num_tables
    segment, tile = tl.program_id(1), tl.program_id(2)
    source, slot = tl.load(sources + row), tl.load(slots + row)
    num_words, block_size = tl.load(words + segment), tl.load(block_sizes + of_table)
    length = tl.load(num_tokens + row)
    if (source == slot) | (length % block_size == 0) | (tile * tile_size >= num_words):
        return
    table = tl.load(table_pointers + of_table).to(tl.pointer_type(tl.int32)) + length // block_size
    stride = tl.load(table_strides + of_table)
    from_block, to_block = tl.load(table + source * stride), tl.load(table + slot * stride)
    blocks, block_stride = tl.load(pointers + segment).to(tl.pointer_type(word)), tl.load(strides + segment)
    index = tile * tile_size + tl.arange(0, tile_size)
    values = tl.load(blocks + from_block * block_stride + index, mask=index < num_words)
    tl.store(blocks + to_block * block_stride + index, values, mask=index < num_words)
