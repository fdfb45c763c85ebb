"""Tokens are moved from slot to slot as vLLM lays them out in its blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops

from vllm_trie.worker.attention.cpu_backend import SharedPrefixAttentionBuilder
from vllm_trie.worker.kv import copies
from vllm_trie.worker.kv.kv_slots import ByToken, KVSlots, kv_in_words

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
    slots = KVSlots([[], by_token(cache, isa)])
    slots.write(1, destinations, slots.read(1, sources))
    for tokens in (keys, values):
        tokens[destinations] = tokens[sources]
    assert torch.equal(cache, written(keys, values, isa))


@LAID_OUT_BY_VLLM
@pytest.mark.parametrize(("isa", "dtype"), LAYOUTS)
@pytest.mark.parametrize(("first", "end"), [(0, 1), (0, 7), (0, 16), (0, 31), (3, 5), (16, 31), (30, 31), (31, 31)])
def test_a_part_of_a_block_is_copied(isa: str, dtype: torch.dtype, first: int, end: int) -> None:
    keys, values = torch.randn(2, NUM_SLOTS, NUM_HEADS, HEAD_SIZE).to(dtype)
    cache = written(keys, values, isa)
    slots = KVSlots([by_token(cache, isa)])
    assert slots.knows(0)
    slots.copy_parts(0, torch.tensor([2]), torch.tensor([0]), torch.tensor([[first], [end]]))
    copied = np.arange(first, end)
    found, expected = KVSlots([by_token(cache, isa)]).read(0, copied), slots.read(0, 2 * BLOCK_SIZE + copied)
    assert all(map(np.array_equal, found, expected))
    rest = written(keys, values, isa).view(NUM_BLOCKS, -1)[1:]
    assert torch.equal(cache.view(NUM_BLOCKS, -1)[1:], rest), "other blocks stay as they are"


def test_of_each_block_the_part_that_it_needs_is_copied() -> None:
    cache = torch.randn(10, NUM_HEADS, BLOCK_SIZE, HEAD_SIZE)
    sources, destinations = torch.tensor([3, 1, 1, 2, 2]), torch.tensor([4, 5, 6, 7, 8])
    parts = torch.tensor([[0, 1, 30, 0, 8], [9, 2, 31, 9, 9]])
    expected = cache.clone()
    for source, destination, first, end in zip(sources, destinations, *parts, strict=True):
        expected[destination, :, first:end] = cache[source, :, first:end]
    KVSlots([[ByToken(cache.transpose(1, 2), (BLOCK_SIZE,))]]).copy_parts(0, sources, destinations, parts)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 2, 1), (0, 2, 3, 1)])
@pytest.mark.parametrize("part", [slice(None), slice(1, 3)])
def test_entries_are_seen_as_words(order: tuple[int, ...], part: slice) -> None:
    held = np.arange(5 * 4 * 6 * 8, dtype=np.int16).reshape(5, 4, 6, 8).transpose(order)[:, part]
    words = kv_in_words(held)
    assert words.itemsize * words[0].size == held[0].nbytes
    copied = held.copy()
    copied[[0, 3]] = held[[4, 2]]
    words[[0, 3]] = words[[4, 2]]
    assert np.array_equal(held, copied)


def some_slots(layers: list[torch.Tensor], block_sizes: tuple[int, int]) -> KVSlots:
    """Two KV cache groups, as FlashAttention lays them out, and beside them a state for each token."""
    by_head = [ByToken(layer.transpose(1, 2), (layer.shape[2],)) for layer in layers[:3]]
    return KVSlots([by_head[:2], [by_head[2], ByToken(layers[3], block_sizes[1:])]])


def test_tokens_of_all_groups_are_moved_by_kernels_as_in_torch() -> None:
    device, sizes, seeded = torch.device(DEVICE), (4, 6), torch.Generator().manual_seed(0)
    shapes = [(9, 3, 4, 10), (9, 1, 4, 300), (9, 2, 6, 10), (9, 6, 7)]
    by_kernel = [torch.randint(99, shape, generator=seeded).to(device, torch.bfloat16) for shape in shapes]
    by_torch = [layer.clone() for layer in by_kernel]
    random = np.random.default_rng(0)
    moves = [
        (number, np.stack([random.permutation(9 * size)[:25] for _ in range(2)])) for number, size in enumerate(sizes)
    ]
    segments, slots = some_slots(by_kernel, sizes).segments, some_slots(by_torch, sizes)
    assert segments is not None
    held = copies.HeldKVTokens(moves, segments)
    assert all(map(torch.equal, by_kernel, by_torch)), "they are read before any is written"
    held.write()
    for number, (from_, to) in moves:
        slots.write(number, to, slots.read(number, from_))
    assert all(map(torch.equal, by_kernel, by_torch))
    assert KVSlots([by_token(torch.zeros(NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), "amx")]).segments is None


def test_layers_that_share_a_cache_are_moved_once() -> None:
    cache = torch.zeros(NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    slots = KVSlots([[*by_token(cache, "vec"), *by_token(cache, "vec"), *by_token(cache.clone(), "vec")]])
    assert len(slots.read(0, np.arange(3))) == 4
