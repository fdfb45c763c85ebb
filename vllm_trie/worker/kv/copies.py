"""Rows that continue the histories of others, and copies of blocks, in a launch each.

In torch `worker.kv.reorder` has the one, and `worker.kv.kv_blocks` the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_trie.search.devices import uploaded_for_search
from vllm_trie.worker.kv.kv_blocks import COPY_TILE, Segments
from vllm_trie.worker.kv.kv_blocks import WORDS as TORCH_WORDS
from vllm_trie.worker.kv.kv_slots import TokenSegments
from vllm_trie.worker.kv.moves import HELD
from vllm_trie.worker.kv.reorder import KVReorder, Tables

WORKERS_OF_TOKEN = 8  # programs that copy the content of a token
TOKEN_TILE = 256  # words that each copies at a time
MOST_PROGRAMS = 4096  # that copy contents of blocks, unless rows are more: more than a GPU runs at a time
WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
# By bytes of words. One stage: nothing is read ahead, as what is read may have been written just before.
SIZES = {n: {"word": word, "tile_size": COPY_TILE, "num_warps": 4, "num_stages": 1} for n, word in WORDS.items()}


def launch_kv_reorder(rows: KVReorder, tokens: torch.Tensor, tables: Tables, segments: Segments) -> None:
    """Let rows continue the histories of others: tokens, full blocks of all tables, and contents of tail blocks.

    Args:
        rows: R of them.
        tokens: [slots, length] int32.
        tables: Of all KV cache groups.
        segments: Where blocks lie, layer by layer.
    """
    num_rows, num_tables = len(rows.num_tokens_on_host), len(tables.tables)
    has_tails = (rows.num_tokens_on_host[:, None] % tables.block_sizes).any()
    num_workers = _kv_copy_workers(num_rows * num_tables, segments) if has_tails else 0
    of_rows = rows.rows, rows.parents, num_rows, tokens, tokens.stride(0)
    _reorder_kv_kernel[num_rows, 1 + num_tables * (1 + num_workers)](
        *of_rows, *tables.on_device, num_tables, num_workers, *segments[:-1], **SIZES[segments.word_bytes]
    )


def launch_kv_block_copies(chains: list[list[tuple[int, int]]], segments: Segments) -> None:
    """Copy whole blocks, in all layers.

    Args:
        chains: Of each the copies (see `moves.kv_copy_chains_of`), one after the other; chains depend on no other.
        segments: Where blocks lie, layer by layer.
    """
    starts = np.cumsum([0, *map(len, chains)])
    order = np.array([copy for chain in chains for copy in chain], dtype=np.int64)
    on_device = uploaded_for_search(np.concatenate([starts, order.ravel()]), segments.pointers.device)
    num_workers = _kv_copy_workers(len(chains), segments)
    _copy_kv_blocks_kernel[len(chains), num_workers](
        on_device, len(chains), num_workers, *segments[:-1], held=HELD, **SIZES[segments.word_bytes]
    )


class HeldKVTokens:
    """What KV slots hold, read by one launch, to be written into others by another one.

    Args:
        moves: By KV cache group, [2, tokens] slots, from where, and where to.
        segments: Where tokens lie, layer by layer.
    """

    def __init__(self, moves: Sequence[tuple[int, np.ndarray]], segments: TokenSegments) -> None:
        fields = [self._of_group(from_to, *segments.groups[number]) for number, from_to in moves]
        self._moves = uploaded_for_search(np.ascontiguousarray(np.concatenate(fields)), segments.sizes.device)
        self._segments, dtype = segments, TORCH_WORDS[segments.word_bytes]
        self._held = torch.empty(len(self._moves) * segments.token_words, dtype=dtype, device=segments.sizes.device)
        self._launch(is_read=True)

    @staticmethod
    def _of_group(from_to: np.ndarray, first: int, end: int, block_size: int) -> np.ndarray:
        """[tokens, 6] int64: segments from the first to the last but one; blocks and places in them."""
        segments = np.broadcast_to([first, end], (from_to.shape[1], 2))
        (source, at), (destination, to) = (divmod(slots, block_size) for slots in from_to)
        return np.column_stack([segments, source, at, destination, to]).astype(np.int64)

    def write(self) -> None:
        """Write them."""
        self._launch(is_read=False)

    def _launch(self, is_read: bool) -> None:
        segments, num_workers = self._segments, min(len(self._segments.pointers), WORKERS_OF_TOKEN)
        _hold_kv_tokens_kernel[len(self._moves), num_workers](
            *(self._moves, self._held, segments.pointers, *segments.sizes, segments.token_words, num_workers),
            word=WORDS[segments.word_bytes],
            is_read=is_read,
            tile_size=TOKEN_TILE,
        )


def _kv_copy_workers(num_copies: int, segments: Segments) -> int:
    """Programs for each block that is copied: few for each where many are."""
    return min(max(MOST_PROGRAMS // num_copies, 1), segments.num_pieces)


@triton.jit
def _copy_kv_in_kernel(source, destination, start, end, tile_size: tl.constexpr):
    for at in range(start, end, tile_size):
        index = at + tl.arange(0, tile_size)
        tl.store(destination + index, tl.load(source + index, mask=index < end), mask=index < end)


@triton.jit
def _kv_piece_in_kernel(piece, pointers, strides, words, num_tiles, word: tl.constexpr, tile_size: tl.constexpr):
    """Of a piece of a block, a tile of a segment: block 0, words from block to block, and [tile] which words it is."""
    segment = piece // num_tiles
    index = (piece % num_tiles) * tile_size + tl.arange(0, tile_size)
    blocks = tl.load(pointers + segment).to(tl.pointer_type(word))
    return blocks, tl.load(strides + segment), index, index < tl.load(words + segment)


@triton.jit(do_not_specialize=["num_rows", "num_workers"], do_not_specialize_on_alignment=["rows", "parents"])
def _reorder_kv_kernel(
    rows, parents, num_rows, tokens, tokens_stride, table_pointers, table_strides, block_sizes, num_tables, num_workers,
    pointers, strides, words, num_pieces, num_tiles, word: tl.constexpr, tile_size: tl.constexpr,
):  # fmt: skip
    """See `launch_kv_reorder`: of each row a program for its tokens, one per table, and `num_workers` per tail block.

    Args:
        rows: [4, R].
        parents: [R].
        tokens: [slots, length].
        pointers: [segments].
        strides: [segments], from block to block, in words.
        words: [segments], of a block.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(rows + row)
    source = tl.load(rows + tl.load(rows + num_rows + row) + tl.load(parents + row))
    if source == slot:
        return
    length = tl.load(rows + 3 * num_rows + row)
    if part == 0:
        source_row, own_row = tokens + source * tokens_stride, tokens + slot * tokens_stride
        _copy_kv_in_kernel(source_row, own_row, tl.load(rows + 2 * num_rows + row), length, tile_size)
        return
    of_table = part - 1
    if part > num_tables:
        of_table = (part - 1 - num_tables) // num_workers
    table = tl.load(table_pointers + of_table).to(tl.pointer_type(tl.int32))
    source_table = table + source * tl.load(table_strides + of_table)
    own_table = table + slot * tl.load(table_strides + of_table)
    block_size = tl.load(block_sizes + of_table)
    if part <= num_tables:
        _copy_kv_in_kernel(source_table, own_table, 0, length // block_size, tile_size)
    elif length % block_size > 0:
        from_block, to_block = tl.load(source_table + length // block_size), tl.load(own_table + length // block_size)
        for piece in range((part - 1 - num_tables) % num_workers, num_pieces, num_workers):
            blocks, stride, index, mask = _kv_piece_in_kernel(
                piece, pointers, strides, words, num_tiles, word, tile_size
            )
            values = tl.load(blocks + from_block * stride + index, mask=mask)
            tl.store(blocks + to_block * stride + index, values, mask=mask)


@triton.jit(do_not_specialize=["num_chains", "num_workers"], do_not_specialize_on_alignment=["chains"])
def _copy_kv_blocks_kernel(
    chains, num_chains, num_workers, pointers, strides, words, num_pieces, num_tiles, held: tl.constexpr, word:
    tl.constexpr, tile_size: tl.constexpr,
):  # fmt: skip
    """See `launch_kv_block_copies`: `num_workers` programs per chain, each with some pieces of all its blocks.

    Args:
        chains: [C + 1] where each begins and ends, then [copies, 2].
        pointers: [segments].
        strides: [segments], from block to block, in words.
        words: [segments], of a block.
    """
    first, end = tl.load(chains + tl.program_id(0)), tl.load(chains + tl.program_id(0) + 1)
    copies = chains + num_chains + 1
    for piece in range(tl.program_id(1), num_pieces, num_workers):
        blocks, stride, index, mask = _kv_piece_in_kernel(piece, pointers, strides, words, num_tiles, word, tile_size)
        saved = tl.zeros([tile_size], word)
        for copy in range(first, end):
            source, destination = tl.load(copies + 2 * copy), tl.load(copies + 2 * copy + 1)
            values = saved
            if source != held:
                values = tl.load(blocks + source * stride + index, mask=mask, other=0)
            if destination == held:
                saved = values
            else:
                tl.store(blocks + destination * stride + index, values, mask=mask)


@triton.jit(
    do_not_specialize=["num_workers"], do_not_specialize_on_alignment=["of_block", "of_place", "words", "offsets"]
)
def _hold_kv_tokens_kernel(
    moves, held, pointers, of_block, of_place, words, offsets, token_words, num_workers, word: tl.constexpr, is_read:
    tl.constexpr, tile_size: tl.constexpr,
):  # fmt: skip
    """See `HeldKVTokens`: `num_workers` programs per token, each with some segments.

    Args:
        moves: [tokens, 6].
        held: [tokens, token_words].
        pointers: [segments].
        of_block: [segments].
        of_place: [segments].
        words: [segments].
        offsets: [segments].
    """
    token = tl.program_id(0).to(tl.int64)
    move = moves + 6 * token
    at = move + 2 if is_read else move + 4
    block, place = tl.load(at), tl.load(at + 1)
    for segment in range(tl.load(move) + tl.program_id(1), tl.load(move + 1), num_workers):
        own = tl.load(pointers + segment).to(tl.pointer_type(word))
        own += block * tl.load(of_block + segment) + place * tl.load(of_place + segment)
        beside = held + token * token_words + tl.load(offsets + segment)
        if is_read:
            _copy_kv_in_kernel(own, beside, 0, tl.load(words + segment), tile_size)
        else:
            _copy_kv_in_kernel(beside, own, 0, tl.load(words + segment), tile_size)


def warm_up_kv_copies(tokens: torch.Tensor, tables: Tables, segments: Segments) -> None:
    """Let a row continue itself, and copy the null block onto itself.

    Args:
        tokens: [slots, length] int32.
        tables, segments: Of the KV cache.
    """
    nothing = torch.zeros(4, 1, dtype=torch.int64, device=tokens.device)
    row = KVReorder(nothing, nothing[0], np.zeros(1, np.int64))
    launch_kv_reorder(row, tokens, tables, segments)
    launch_kv_block_copies([[(0, 0)]], segments)


def warm_up_kv_moves(segments: TokenSegments) -> None:
    """Move the first token of the null block onto itself."""
    HeldKVTokens([(0, np.zeros((2, 1), np.int64))], segments).write()
