"""Rows that continue the histories of others, in two launches; `worker.reorder` has it in torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_trie.worker.kv_blocks import Segments
from vllm_trie.worker.row_reorder import RowReorder, Tables

COPY_TILE = 1024  # words, or table entries, that one program copies at a time
WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


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
