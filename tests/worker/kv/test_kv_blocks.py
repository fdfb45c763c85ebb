"""Copies between KV blocks, where layers of several KV cache groups lie over each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_trie.worker.kv.kv_blocks import SMALL_BYTES, KVBlocks

NUM_BLOCKS = 5


def test_layers_that_lie_over_each_other_are_all_read_before_any_is_written() -> None:
    """A group's blocks may be sources while another's are destinations, in one and the same copy."""
    memory = torch.arange(NUM_BLOCKS * 64, dtype=torch.float32)
    views = [memory.view(NUM_BLOCKS, 2, 4, 8), memory.view(NUM_BLOCKS, 8, 8), memory.view(4 * NUM_BLOCKS, 16)]
    strided = memory.view(NUM_BLOCKS, 4, 2, 8).transpose(1, 2)
    before = memory.view(NUM_BLOCKS, -1).clone()
    KVBlocks([*views, strided], NUM_BLOCKS).copy(np.array([0, 1, 2]), np.array([1, 2, 4]))
    assert memory.view(NUM_BLOCKS, -1).equal(before[[0, 0, 1, 3, 2]])


def test_views_of_one_block_that_see_different_parts_of_it_are_all_copied() -> None:
    memory = torch.arange(NUM_BLOCKS * 64, dtype=torch.float32).view(NUM_BLOCKS, 64)
    views = [memory.as_strided((NUM_BLOCKS, 2, 8), (64, between_heads, 1)) for between_heads in (16, 32)]
    expected = memory.clone()
    for head in (slice(0, 8), slice(16, 24), slice(32, 40)):
        expected[4, head] = memory[1, head]
    KVBlocks(views, NUM_BLOCKS).copy_to_others(torch.tensor([1]), torch.tensor([4]))
    assert memory.equal(expected)


def test_a_block_that_is_copied_onto_itself_stays() -> None:
    memory = torch.arange(NUM_BLOCKS * 8, dtype=torch.int64)
    before = memory.clone()
    KVBlocks([memory.view(NUM_BLOCKS, 8)], NUM_BLOCKS).copy(np.array([3, 1]), np.array([3, 1]))
    assert memory.equal(before)


@pytest.mark.parametrize("num_bytes", [SMALL_BYTES // 4, 4 * SMALL_BYTES])
def test_many_blocks_are_copied_however_large_they_are(num_bytes: int) -> None:
    memory = torch.randint(99, (40, 3, num_bytes // 2), generator=torch.Generator().manual_seed(0)).bfloat16()
    layers = [memory[:, 0], memory[:, 2]]  # whose blocks do not lie one after the other
    sources, destinations = np.repeat(np.arange(10), 3), np.arange(10, 40)
    expected = memory.clone()
    expected[10:, ::2] = memory[:10, ::2].repeat_interleave(3, dim=0)
    KVBlocks(layers, 40).copy_to_others(torch.from_numpy(sources), torch.from_numpy(destinations))
    assert memory.equal(expected)
