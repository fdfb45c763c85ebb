"""What an encoder made is held once, by as many rows as there are, whatever these do."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_trie.trie.encoder_blocks import EncoderBlockTrie


@pytest.mark.parametrize("blocks", [[10, 11, 12], [10], []], ids=len)
@pytest.mark.parametrize("width", [1, 5])
def test_rows_that_grow_and_fork_hold_the_same_blocks_until_the_end(blocks: list[int], width: int) -> None:
    trie = EncoderBlockTrie.of(blocks, block_size=4)
    assert len(trie.fan_out(np.arange(2 * width).reshape(width, 2), [])) == 0
    for num_tokens in range(1, 20):
        assert trie.blocks_to_grow() == 0
        trie.grow([])
        trie.fork(np.zeros(width, np.int32), num_tokens)
        trie.check_invariants()
        assert trie.width == width
        assert all(trie.row_blocks(row) == blocks for row in range(width))
        assert trie.table().tolist() == [blocks] * width
        assert trie.num_live_blocks == len(blocks)
        assert trie.reclaim() == []
    assert trie.release() == blocks[::-1]
    assert trie.counts.copied == trie.counts.shared == trie.counts.reclaimed == 0
