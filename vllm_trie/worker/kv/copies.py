"""Forks KV by one launch, and moves it by up to three. In torch `worker.kv.kv_moves` has both."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_trie.search.devices import uploaded_for_search
from vllm_trie.worker.kv.kv_caches import COPY_TILE, HELD, KVCaches, KVSegments, kv_copies_in_order
from vllm_trie.worker.kv.kv_caches import WORDS as TORCH_WORDS
from vllm_trie.worker.kv.kv_moves import KVFork, KVMoves

WORKERS_OF_TOKEN = 8  # programs that copy the contents of a token
TOKEN_TILE = 256  # words that each copies at a time
MOST_PROGRAMS = 4096  # that copy contents of blocks, unless there are more rows: more than a GPU runs at a time
WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
# By bytes of words. One stage: nothing may be read ahead, because it may have been written just before.
SIZES = {n: {"word": word, "tile_size": COPY_TILE, "num_warps": 4, "num_stages": 1} for n, word in WORDS.items()}


def launch_kv_fork(fork: KVFork, tokens: torch.Tensor, kv: KVCaches) -> None:
    """See `kv_moves.fork_kv`."""
    num_rows, num_tables, segments = len(fork.num_tokens_on_host), len(kv.tables), kv.block_segments
    has_tails = (fork.num_tokens_on_host[:, None] % kv.block_sizes).any()
    num_workers = _kv_copy_workers(num_rows * num_tables, segments) if has_tails else 0
    of_rows = fork.rows, fork.parents, num_rows, tokens, tokens.stride(0), *kv.tables_on_device, num_tables, num_workers
    _fork_kv_kernel[num_rows, 1 + num_tables * (1 + num_workers)](
        *of_rows,
        segments.pointers,
        segments.of_block,
        segments.words,
        segments.num_pieces,
        segments.num_tiles,
        **SIZES[segments.word_bytes],
    )


def launch_kv_moves(moves: KVMoves, kv: KVCaches) -> None:
    """See `kv_moves.move_kv`."""
    assert not moves.parts, "parts are only copied on hosts"
    moving = [(number, from_to) for number, from_to in enumerate(moves.tokens) if from_to.size]
    if moving:
        fields = np.concatenate([_kv_token_moves(kv, *of_number) for of_number in moving])
        on_device = uploaded_for_search(np.ascontiguousarray(fields), kv.device)
        words = TORCH_WORDS[kv.token_segments.word_bytes]
        held = torch.empty(len(fields) * kv.token_segments.total_words, dtype=words, device=kv.device)
        _launch_kv_tokens(on_device, held, kv.token_segments, is_read=True)
    if len(moves.blocks):
        if kv.are_apart:
            _launch_kv_blocks(*kv_copies_in_order(moves.blocks), kv.block_segments)
        else:
            kv.copy_blocks(moves.blocks)
    if moving:
        _launch_kv_tokens(on_device, held, kv.token_segments, is_read=False)


def _launch_kv_blocks(ordered: np.ndarray, num_alone: int, segments: KVSegments) -> None:
    """Copies blocks: a chain for each copy that depends on no other, and one chain of all others."""
    starts = np.unique([*range(num_alone + 1), len(ordered)])
    chains = uploaded_for_search(np.concatenate([starts, ordered.ravel()]), segments.pointers.device)
    num_chains = len(starts) - 1
    num_workers = _kv_copy_workers(num_chains, segments)
    _copy_kv_blocks_kernel[num_chains, num_workers](
        chains,
        num_chains,
        num_workers,
        segments.pointers,
        segments.of_block,
        segments.words,
        segments.num_pieces,
        segments.num_tiles,
        held=HELD,
        **SIZES[segments.word_bytes],
    )


def _kv_token_moves(kv: KVCaches, number: int, from_to: np.ndarray) -> np.ndarray:
    """[tokens, 6] int64: first segment and the one after the last; source block and place; destination's."""
    segments = np.broadcast_to(kv.token_segments.starts[number : number + 2], (from_to.shape[1], 2))
    (source, at), (destination, to) = (divmod(slots, kv.tokens_of_block[number]) for slots in from_to)
    return np.column_stack([segments, source, at, destination, to]).astype(np.int64)


def _launch_kv_tokens(moves: torch.Tensor, held: torch.Tensor, segments: KVSegments, is_read: bool) -> None:
    """Reads the contents of tokens, or writes them to where the tokens move."""
    num_workers = min(len(segments.pointers), WORKERS_OF_TOKEN)
    sizes = segments.of_block, segments.of_token, segments.words, segments.offsets
    _hold_kv_tokens_kernel[len(moves), num_workers](
        *(moves, held, segments.pointers, *sizes, segments.total_words, num_workers),
        word=WORDS[segments.word_bytes],
        is_read=is_read,
        tile_size=TOKEN_TILE,
    )


def _kv_copy_workers(num_copies: int, segments: KVSegments) -> int:
    """Programs for each copied block: few where there are many blocks."""
    return min(max(MOST_PROGRAMS // num_copies, 1), segments.num_pieces)


@triton.jit
def _copy_kv_in_kernel(source, destination, start, end, tile_size: tl.constexpr):
    for at in range(start, end, tile_size):
        index = at + tl.arange(0, tile_size)
        tl.store(destination + index, tl.load(source + index, mask=index < end), mask=index < end)


@triton.jit
def _kv_piece_in_kernel(piece, pointers, of_block, words, num_tiles, word: tl.constexpr, tile_size: tl.constexpr):
    """A piece of a block, that is, a tile of a segment: block 0, words from block to block, and [tile] its words."""
    segment = piece // num_tiles
    index = (piece % num_tiles) * tile_size + tl.arange(0, tile_size)
    blocks = tl.load(pointers + segment).to(tl.pointer_type(word))
    return blocks, tl.load(of_block + segment), index, index < tl.load(words + segment)


@triton.jit(do_not_specialize=["num_rows", "num_workers"], do_not_specialize_on_alignment=["rows", "parents"])
def _fork_kv_kernel(
    rows, parents, num_rows, tokens, tokens_stride, table_pointers, table_strides, block_sizes, num_tables, num_workers,
    pointers, of_block, words, num_pieces, num_tiles, word: tl.constexpr, tile_size: tl.constexpr,
):  # fmt: skip
    """See `launch_kv_fork`: per row, a program for its tokens, one per table, and `num_workers` per tail block.

    Args:
        rows: [4, R].
        parents: [R].
        tokens: [slots, length].
        pointers: [segments].
        of_block: [segments], from block to block, in words.
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
                piece, pointers, of_block, words, num_tiles, word, tile_size
            )
            values = tl.load(blocks + from_block * stride + index, mask=mask)
            tl.store(blocks + to_block * stride + index, values, mask=mask)


@triton.jit(do_not_specialize=["num_chains", "num_workers"], do_not_specialize_on_alignment=["chains"])
def _copy_kv_blocks_kernel(
    chains, num_chains, num_workers, pointers, of_block, words, num_pieces, num_tiles, held: tl.constexpr, word:
    tl.constexpr, tile_size: tl.constexpr,
):  # fmt: skip
    """See `_launch_kv_blocks`: `num_workers` programs per chain, each with some pieces of all its blocks.

    Args:
        chains: [C + 1] where each begins and ends, then [copies, 2].
        pointers: [segments].
        of_block: [segments], from block to block, in words.
        words: [segments], of a block.
    """
    first, end = tl.load(chains + tl.program_id(0)), tl.load(chains + tl.program_id(0) + 1)
    copies = chains + num_chains + 1
    for piece in range(tl.program_id(1), num_pieces, num_workers):
        blocks, stride, index, mask = _kv_piece_in_kernel(piece, pointers, of_block, words, num_tiles, word, tile_size)
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


@triton.jit(do_not_specialize=["num_workers"])
def _hold_kv_tokens_kernel(
    moves, held, pointers, of_block, of_token, words, offsets, token_words, num_workers, word: tl.constexpr, is_read:
    tl.constexpr, tile_size: tl.constexpr,
):  # fmt: skip
    """See `_launch_kv_tokens`: `num_workers` programs per token, each with some segments.

    Args:
        moves: [tokens, 6].
        held: [tokens, token_words].
        pointers: [segments].
        of_block: [segments].
        of_token: [segments].
        words: [segments].
        offsets: [segments].
    """
    token = tl.program_id(0).to(tl.int64)
    move = moves + 6 * token
    at = move + 2 if is_read else move + 4
    block, place = tl.load(at), tl.load(at + 1)
    for segment in range(tl.load(move) + tl.program_id(1), tl.load(move + 1), num_workers):
        own = tl.load(pointers + segment).to(tl.pointer_type(word))
        own += block * tl.load(of_block + segment) + place * tl.load(of_token + segment)
        held_token = held + token * token_words + tl.load(offsets + segment)
        if is_read:
            _copy_kv_in_kernel(own, held_token, 0, tl.load(words + segment), tile_size)
        else:
            _copy_kv_in_kernel(held_token, own, 0, tl.load(words + segment), tile_size)


def warm_up_kv_copies(tokens: torch.Tensor, kv: KVCaches) -> None:
    """Lets a row continue itself, and copies the null block onto itself.

    Args:
        tokens: [slots, length] int32.
        kv: The engine's.
    """
    nothing = torch.zeros(4, 1, dtype=torch.int64, device=tokens.device)
    launch_kv_fork(KVFork(nothing, nothing[0], np.zeros(1, np.int64)), tokens, kv)
    _launch_kv_blocks(np.zeros((1, 2), np.int64), 1, kv.block_segments)


def warm_up_kv_moves(kv: KVCaches) -> None:
    """Moves the first token of the null block onto itself."""
    launch_kv_moves(KVMoves(np.zeros((0, 2), np.int64), [np.zeros((2, 1), np.int64)]), kv)
