"""Blocks are copied whatever their layout, and tokens moved from slot to slot as vLLM lays them out in blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops

from vllm_trie.worker.attention.cpu_backend import SharedPrefixAttentionBuilder
from vllm_trie.worker.kv import copies
from vllm_trie.worker.kv.kv_caches import SMALL_BYTES, ByToken, KVCaches, kv_in_words
from vllm_trie.worker.kv.kv_moves import KVMoves, move_kv_by_torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, HEAD_SIZE = 3, 2, 32, 64
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE
LAID_OUT_BY_VLLM = pytest.mark.skipif(
    not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"), reason="vLLM's CPU build lays tokens out, and this is none"
)
NO_AMX = pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this processor has no AMX")
LAYOUTS = [
    ("vec", torch.float32),
    ("vec", torch.bfloat16),
    ("vec16", torch.float16),
    pytest.param("amx", torch.bfloat16, marks=NO_AMX),
]


def written(keys: torch.Tensor, values: torch.Tensor, isa: str) -> torch.Tensor:
    """A KV cache in which vLLM has put [slots, heads, head size] keys and values."""
    cache = torch.zeros(NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE, dtype=keys.dtype)
    halves = cache.view(NUM_BLOCKS, NUM_HEADS, 2 * BLOCK_SIZE, HEAD_SIZE).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, *halves, torch.arange(NUM_SLOTS), isa)
    return cache


def by_token(cache: torch.Tensor, isa: str) -> list[ByToken]:
    builder: Any = SimpleNamespace(isa=isa)
    return SharedPrefixAttentionBuilder.by_token(builder, cache)


@LAID_OUT_BY_VLLM
@pytest.mark.parametrize(("isa", "dtype"), LAYOUTS)
def test_tokens_are_moved_as_vllm_lays_them_out(isa: str, dtype: torch.dtype) -> None:
    keys, values = torch.randn(2, NUM_SLOTS, NUM_HEADS, HEAD_SIZE).to(dtype)
    cache, rng = written(keys, values, isa), np.random.default_rng(0)
    sources, destinations = rng.permutation(NUM_SLOTS)[:20], rng.permutation(NUM_SLOTS)[:20]
    kv = KVCaches([cache], NUM_BLOCKS, [[], by_token(cache, isa)])
    kv.write_tokens(1, destinations, kv.read_tokens(1, sources))
    for tokens in (keys, values):
        tokens[destinations] = tokens[sources]
    assert torch.equal(cache, written(keys, values, isa))


@LAID_OUT_BY_VLLM
@pytest.mark.parametrize(("isa", "dtype"), LAYOUTS)
@pytest.mark.parametrize(("first", "end"), [(0, 1), (0, 7), (0, 16), (0, 31), (3, 5), (16, 31), (30, 31), (31, 31)])
def test_a_part_of_a_block_is_copied(isa: str, dtype: torch.dtype, first: int, end: int) -> None:
    keys, values = torch.randn(2, NUM_SLOTS, NUM_HEADS, HEAD_SIZE).to(dtype)
    cache = written(keys, values, isa)
    kv = KVCaches([cache], NUM_BLOCKS, [by_token(cache, isa)])
    assert kv.tokens_of_block[0] == BLOCK_SIZE
    kv.copy_parts(0, np.array([[2, 0]]), np.array([[first, end]]))
    copied = np.arange(first, end)
    found, expected = kv.read_tokens(0, copied), kv.read_tokens(0, 2 * BLOCK_SIZE + copied)
    assert all(map(np.array_equal, found, expected))
    rest = written(keys, values, isa).view(NUM_BLOCKS, -1)[1:]
    assert torch.equal(cache.view(NUM_BLOCKS, -1)[1:], rest), "other blocks stay as they are"


def test_of_each_block_the_part_that_it_needs_is_copied() -> None:
    cache = torch.randn(10, NUM_HEADS, BLOCK_SIZE, HEAD_SIZE)
    pairs = np.array([[3, 4], [1, 5], [1, 6], [2, 7], [2, 8]])
    parts = np.array([[0, 9], [1, 2], [30, 31], [0, 9], [8, 9]])
    expected = cache.clone()
    for source, destination, first, end in np.hstack([pairs, parts]):
        expected[destination, :, first:end] = cache[source, :, first:end]
    KVCaches([cache], 10, [[ByToken(cache.transpose(1, 2), (BLOCK_SIZE,))]]).copy_parts(0, pairs, parts)
    assert torch.equal(cache, expected)


def test_where_tokens_lie_in_tiles_whole_tiles_are_copied_and_no_kernel_moves_tokens() -> None:
    cache = torch.randn(10, NUM_HEADS, 8, HEAD_SIZE, 4)
    kv = KVCaches([cache], 10, [[ByToken(cache.permute(0, 2, 4, 1, 3), (8, 4))]])
    expected = cache.clone()
    expected[4, :, 1:3], expected[5, :, 2:] = cache[3, :, 1:3], cache[1, :, 2:]
    kv.copy_parts(0, np.array([[3, 4], [1, 5]]), np.array([[5, 12], [10, 29]]))
    assert torch.equal(cache, expected)
    with pytest.raises(AssertionError, match="tiles"):
        _ = kv.token_segments


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 2, 1), (0, 2, 3, 1)])
@pytest.mark.parametrize("part", [slice(None), slice(1, 3)])
def test_entries_are_seen_as_words(order: tuple[int, ...], part: slice) -> None:
    held = torch.arange(5 * 4 * 6 * 8, dtype=torch.int16).view(5, 4, 6, 8).permute(order)[:, part]
    words = kv_in_words(held)
    assert words.element_size() * words[0].numel() == held[0].nbytes
    assert words.data_ptr() == held.data_ptr()
    expected = held.clone()
    expected[[0, 3]] = held[[4, 2]]
    words[[0, 3]] = words[[4, 2]]
    assert held.equal(expected)


def some_caches(layers: list[torch.Tensor], block_sizes: tuple[int, int]) -> KVCaches:
    """Two KV cache groups, as FlashAttention lays them out, and beside them a state for each token."""
    by_head = [ByToken(layer.transpose(1, 2), (layer.shape[2],)) for layer in layers[:3]]
    return KVCaches(layers, 9, [by_head[:2], [by_head[2], ByToken(layers[3], block_sizes[1:])]])


@pytest.mark.parametrize("num_blocks", [0, 9])
def test_blocks_and_on_top_of_them_tokens_of_all_groups_are_moved_by_kernels_as_in_torch(num_blocks: int) -> None:
    device, sizes, seeded = torch.device(DEVICE), (4, 6), torch.Generator().manual_seed(0)
    shapes = [(9, 3, 4, 10), (9, 1, 4, 300), (9, 2, 6, 10), (9, 6, 7)]
    by_kernel = [torch.randint(99, shape, generator=seeded).to(device, torch.bfloat16) for shape in shapes]
    by_torch, before = ([layer.clone() for layer in by_kernel] for _ in range(2))
    random = np.random.default_rng(0)
    tokens = [np.stack([random.permutation(9 * size)[:25] for _ in range(2)]) for size in sizes]
    blocks = np.stack([random.permutation(9), random.permutation(9)], axis=1)[:num_blocks]
    moves = KVMoves(blocks, tokens)
    copies.launch_kv_moves(moves, some_caches(by_kernel, sizes))
    move_kv_by_torch(moves, some_caches(by_torch, sizes))
    assert all(map(torch.equal, by_kernel, by_torch))
    (sources, destinations), last = tokens[1], by_kernel[3].flatten(0, 1)
    assert last[destinations].equal(before[3].flatten(0, 1)[sources]), "they are read before any is written"
    others = np.setdiff1d(np.arange(54), destinations)
    block_of = np.arange(9)
    block_of[blocks[:, 1]] = blocks[:, 0]
    assert last[others].equal(before[3][block_of].flatten(0, 1)[others])


def test_layers_that_share_a_cache_are_moved_once() -> None:
    cache = torch.zeros(NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    of_group = [*by_token(cache, "vec"), *by_token(cache, "vec"), *by_token(cache.clone(), "vec")]
    assert len(KVCaches([cache], NUM_BLOCKS, [of_group]).read_tokens(0, np.arange(3))) == 4


def test_layers_that_lie_over_each_other_are_all_read_before_any_is_written() -> None:
    """A group's blocks may be sources while another's are destinations, in one and the same copy."""
    memory = torch.arange(5 * 64, dtype=torch.float32)
    views = [memory.view(5, 2, 4, 8), memory.view(5, 8, 8), memory.view(4 * 5, 16)]
    strided = memory.view(5, 4, 2, 8).transpose(1, 2)
    before = memory.view(5, -1).clone()
    KVCaches([*views, strided], 5).copy_blocks(np.array([[0, 1], [1, 2], [2, 4]]))
    assert memory.view(5, -1).equal(before[[0, 0, 1, 3, 2]])


def test_views_of_one_block_that_see_different_parts_of_it_are_all_copied() -> None:
    memory = torch.arange(5 * 64, dtype=torch.float32).view(5, 64)
    views = [memory.as_strided((5, 2, 8), (64, between_heads, 1)) for between_heads in (16, 32)]
    expected = memory.clone()
    for head in (slice(0, 8), slice(16, 24), slice(32, 40)):
        expected[4, head] = memory[1, head]
    KVCaches(views, 5).copy_blocks(np.array([[1, 4]]))
    assert memory.equal(expected)


def test_a_block_that_is_copied_onto_itself_stays() -> None:
    memory = torch.arange(5 * 8, dtype=torch.int64)
    before = memory.clone()
    KVCaches([memory.view(5, 8)], 5).copy_blocks(np.array([[3, 3], [1, 1]]))
    assert memory.equal(before)


@pytest.mark.parametrize("num_bytes", [SMALL_BYTES // 4, 4 * SMALL_BYTES])
def test_many_blocks_are_copied_however_large_they_are(num_bytes: int) -> None:
    memory = torch.randint(99, (40, 3, num_bytes // 2), generator=torch.Generator().manual_seed(0)).bfloat16()
    layers = [memory[:, 0], memory[:, 2]]  # whose blocks do not lie one after the other
    sources, destinations = np.repeat(np.arange(10), 3), np.arange(10, 40)
    expected = memory.clone()
    expected[10:, ::2] = memory[:10, ::2].repeat_interleave(3, dim=0)
    KVCaches(layers, 40).copy_blocks(np.stack([sources, destinations], axis=1))
    assert memory.equal(expected)
