"""Triton kernels of selection and reordering; `search.slots` and `reorder` have in torch what each must equal.

Nothing here waits for the device, and what a kernel computes depends on no schedule: no float atomics, no
autotuning. So ranks of tensor parallelism agree.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_trie.search.rank import Candidates
from vllm_trie.search.slots import select_next as select_next_in_torch
from vllm_trie.worker.kv_blocks import Segments
from vllm_trie.worker.row_reorder import RowReorder, Tables

COPY_TILE = 1024  # words, or table entries, that one program copies at a time
PAIRS_PER_THREAD = 32  # (slot, candidate) pairs that a thread of `_select_next` compares at a time; more would spill
MOST_SLOTS = 1024  # of a program of `_select_next`; of more it would spill, and its work grows with their square
WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def run_on(device: torch.device) -> bool:
    """Whether kernels do the work on this device; elsewhere torch does."""
    return device.type == "cuda"


def select_next(
    candidates: Candidates[torch.Tensor], lives: torch.Tensor, width: int, num_rows: int
) -> Candidates[torch.Tensor]:
    """What `search.slots.select_next` does, by one program per group; by torch itself where groups are too wide.

    Args:
        candidates: [G, K], the best first.
        lives: [G, K] bool, which of them may go on.
        width: Beams per group, b.
        num_rows: Rows per group that they continue: 1, or b.
    """
    if width > MOST_SLOTS:
        return select_next_in_torch(candidates, lives, width, num_rows)
    num_groups, count = lives.shape
    slots = triton.next_power_of_2(width)
    chunk, num_warps = candidates_at_a_time(slots), warps_to_select(slots)
    ranked = *(field.contiguous() for field in candidates), lives.contiguous().view(torch.int8)
    parents, tokens = torch.empty(2, num_groups, width, dtype=torch.int64, device=lives.device)
    beams = Candidates(parents, tokens, torch.empty(num_groups, width, dtype=torch.float32, device=lives.device))
    _select_next[num_groups,](*ranked, count, *beams, width, num_rows, slots=slots, chunk=chunk, num_warps=num_warps)
    return beams


def warps_to_select(slots: int) -> int:
    """Warps of a program of `_select_next`."""
    return 4 if slots <= 64 else 8 if slots <= 256 else 16


def candidates_at_a_time(slots: int) -> int:
    """Candidates that a program of `_select_next` compares with all slots at a time."""
    return min(max(PAIRS_PER_THREAD * 32 * warps_to_select(slots) // slots, 16), 32)


def copy_histories(rows: RowReorder, tokens: torch.Tensor, tables: Tables) -> None:
    """What `reorder.copy_histories` does: tokens beyond the common ones, and full blocks of all tables.

    Args:
        rows: R of them.
        tokens: [slots, length] int32.
        tables: Of all KV cache groups.
    """
    _copy_histories[len(rows.num_tokens_on_host), 1 + len(tables.tables)](
        *rows.rows, tokens, tokens.stride(0), *tables.on_device, tile_size=COPY_TILE, num_warps=4
    )


def copy_tails(rows: RowReorder, tables: Tables, segments: Segments) -> None:
    """What `reorder.copy_tails` does: the content of partly filled tail blocks, in all layers.

    Args:
        rows: R of them.
        tables: Of all KV cache groups.
        segments: Where blocks lie, layer by layer.
    """
    num_tables, num_tiles = len(tables.tables), triton.cdiv(segments.most_words, COPY_TILE)
    of_rows = *rows.rows[:2], rows.rows[3]  # what all histories have in common matters to tokens alone
    of_segments, word = (segments.pointers, segments.strides, segments.words), WORDS[segments.word_bytes]
    _copy_tails[len(rows.num_tokens_on_host) * num_tables, len(segments.pointers), num_tiles](
        *of_rows, *tables.on_device, num_tables, *of_segments, word=word, tile_size=COPY_TILE, num_warps=4
    )


@triton.jit
def _first_alive(lives, rank, count, num_alive, width):
    """Which candidates at `rank` are among the first `width` that live."""
    alive = tl.load(lives + rank, mask=rank < count, other=0) != 0
    return alive & (num_alive + tl.cumsum(alive.to(tl.int32), axis=0) <= width)


# A kernel is compiled anew where the alignment of an argument changes; those of packed tensors change with the batch.


@triton.jit(do_not_specialize=["count", "width", "num_rows"], do_not_specialize_on_alignment=["next_tokens"])
def _select_next(
    parents, tokens, scores, lives, count, next_parents, next_tokens, next_scores, width, num_rows, slots: tl.constexpr,
    chunk: tl.constexpr,
):  # fmt: skip
    """See `select_next`: a program per group.

    Args:
        parents: [G, K] int64.
        tokens: [G, K] int64.
        scores: [G, K].
        lives: [G, K] int8.
        next_parents: [G, b] int64.
        next_tokens: [G, b] int64.
        next_scores: [G, b].
    """
    first = tl.program_id(0).to(tl.int64) * count
    parents, tokens, scores, lives = parents + first, tokens + first, scores + first, lives + first
    slot = tl.arange(0, slots)

    # Each slot's first child. As a rule `width` candidates live among little more than as many.
    chosen = tl.zeros([slots], tl.int32) + count
    start = 0
    num_alive = 0
    while (start < count) & (num_alive < width):
        rank = start + tl.arange(0, chunk)
        alive = _first_alive(lives, rank, count, num_alive, width)
        parent = tl.load(parents + rank, mask=rank < count, other=0).to(tl.int32)
        is_child = (parent[None, :] == slot[:, None]) & alive[None, :]
        chosen = tl.minimum(chosen, tl.min(tl.where(is_child, rank[None, :], count), axis=1))
        num_alive += tl.sum(alive.to(tl.int32), axis=0)
        start += chunk

    # The n-th of the other children takes the n-th dead slot.
    first_child = chosen
    is_dead = (first_child == count) & (slot < width)
    nth_dead = tl.where(is_dead, tl.cumsum(is_dead.to(tl.int32), axis=0), 0)
    start = 0
    num_alive = 0
    num_others = 0
    while (start < count) & (num_alive < width):
        rank = start + tl.arange(0, chunk)
        alive = _first_alive(lives, rank, count, num_alive, width)
        is_first = tl.max((first_child[:, None] == rank[None, :]).to(tl.int32), axis=0)
        others = (alive & (is_first == 0)).to(tl.int32)
        nth_other = tl.where(others == 1, num_others + tl.cumsum(others, axis=0), -1)
        takes = nth_dead[:, None] == nth_other[None, :]
        chosen = tl.minimum(chosen, tl.min(tl.where(takes, rank[None, :], count), axis=1))
        num_alive += tl.sum(alive.to(tl.int32), axis=0)
        num_others += tl.sum(others, axis=0)
        start += chunk

    is_slot, has_beam = slot < width, chosen < count
    chosen, at = tl.minimum(chosen, count - 1), tl.program_id(0) * width + slot
    itself = tl.minimum(slot, num_rows - 1).to(tl.int64)
    tl.store(next_parents + at, tl.where(has_beam, tl.load(parents + chosen), itself), mask=is_slot)
    tl.store(next_tokens + at, tl.load(tokens + chosen), mask=is_slot)
    tl.store(next_scores + at, tl.where(has_beam, tl.load(scores + chosen), float("-inf")), mask=is_slot)


@triton.jit
def _copy(source, destination, start, end, tile_size: tl.constexpr):
    for at in range(start, end, tile_size):
        index = at + tl.arange(0, tile_size)
        tl.store(destination + index, tl.load(source + index, mask=index < end), mask=index < end)


@triton.jit(do_not_specialize_on_alignment=["slots", "sources", "num_common", "num_tokens"])
def _copy_histories(
    slots, sources, num_common, num_tokens, tokens, tokens_stride, table_pointers, table_strides, block_sizes,
    tile_size: tl.constexpr,
):  # fmt: skip
    """See `copy_histories`: a program per row and table, and one for its tokens.

    Args:
        slots: [R].
        sources: [R].
        num_common: [R].
        num_tokens: [R].
        tokens: [slots, length].
    """
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


@triton.jit(do_not_specialize=["num_tables"], do_not_specialize_on_alignment=["slots", "sources", "num_tokens"])
def _copy_tails(
    slots, sources, num_tokens, table_pointers, table_strides, block_sizes, num_tables, pointers, strides, words, word:
    tl.constexpr, tile_size: tl.constexpr,
):  # fmt: skip
    """See `copy_tails`: a program per row and table, segment and tile.

    Args:
        slots: [R].
        sources: [R].
        num_tokens: [R].
        pointers: [segments].
        strides: [segments], from block to block, in words.
        words: [segments], of a block.
    """
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
