"""The KV blocks of encoder outputs: all rows of a group read them, and no row writes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_trie.trie.blocks import BlockTrie


class EncoderBlockTrie(BlockTrie):
    """Blocks that are filled before a group fans out, and do not change until it ends.

    To the trie they are a prefix of full blocks, after which rows have nothing. So the tokens here are those of whole
    blocks, not generated ones.
    """

    holds_tokens = False

    @classmethod
    def of(cls, blocks: Sequence[int], block_size: int) -> EncoderBlockTrie:
        """The trie of the only row of a group that is to fan out."""
        return cls(block_size, blocks, len(blocks) * block_size)

    def fan_out(self, paths: np.ndarray, new_blocks: Sequence[int]) -> np.ndarray:
        """Turn one row into as many as there are paths, which share all blocks; there are no copies."""
        return super().fan_out(paths[:, :0], new_blocks)

    def blocks_to_grow(self) -> int:
        """None: rows never need new blocks."""
        return 0

    def grow(self, new_blocks: Sequence[int]) -> None:
        """Nothing to do: new tokens of rows are not stored here."""
        assert not len(new_blocks)

    def fork(self, parents: np.ndarray, num_tokens: int | None = None) -> None:
        """Nothing to do: all rows share the same blocks."""
