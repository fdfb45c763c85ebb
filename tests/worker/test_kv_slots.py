"""Tokens are moved from slot to slot as vLLM lays them out in its blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops

from vllm_trie.worker.attention.cpu_backend import SharedPrefixBuilder
from vllm_trie.worker.kv_slots import ByToken, KVSlots

NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, HEAD_SIZE = 3, 2, 32, 64
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE
LAYOUTS = [("vec", torch.float32), ("vec", torch.bfloat16), ("vec16", torch.float16), ("amx", torch.bfloat16)]


def written(keys: torch.Tensor, values: torch.Tensor, isa: str) -> torch.Tensor:
    """A KV cache in which vLLM has put [slots, heads, head size] keys and values."""
    cache = torch.zeros(NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE, dtype=keys.dtype)
    halves = cache.view(NUM_BLOCKS, NUM_HEADS, 2 * BLOCK_SIZE, HEAD_SIZE).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, *halves, torch.arange(NUM_SLOTS), isa)
    return cache


def by_token(cache: torch.Tensor, isa: str) -> list[ByToken]:
    builder: Any = SimpleNamespace(isa=isa)
    return SharedPrefixBuilder.by_token(builder, cache)


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


@pytest.mark.parametrize(("isa", "dtype"), LAYOUTS)
@pytest.mark.parametrize("count", [1, 7, 16, 31])
def test_the_first_tokens_of_a_block_are_copied(isa: str, dtype: torch.dtype, count: int) -> None:
    keys, values = torch.randn(2, NUM_SLOTS, NUM_HEADS, HEAD_SIZE).to(dtype)
    cache = written(keys, values, isa)
    slots = KVSlots([by_token(cache, isa)])
    assert slots.knows(0)
    slots.copy_first(0, *(torch.tensor([n]) for n in (2, 0, count)))
    copied = np.arange(count)
    found, expected = KVSlots([by_token(cache, isa)]).read(0, copied), slots.read(0, 2 * BLOCK_SIZE + copied)
    assert all(map(np.array_equal, found, expected))
    rest = written(keys, values, isa).view(NUM_BLOCKS, -1)[1:]
    assert torch.equal(cache.view(NUM_BLOCKS, -1)[1:], rest), "other blocks stay as they are"


def test_layers_that_share_a_cache_are_moved_once() -> None:
    cache = torch.zeros(NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    slots = KVSlots([[*by_token(cache, "vec"), *by_token(cache, "vec"), *by_token(cache.clone(), "vec")]])
    assert len(slots.read(0, np.arange(3))) == 4
