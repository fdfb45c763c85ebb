"""The KV blocks of what an encoder made of a prompt: all rows of a group read them, and no row writes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_trie.trie.blocks import BlockTrie


class EncoderBlockTrie(BlockTrie):
    """Blocks that are filled before a group fans out, and stay as they are until it ends.

    They are a prefix of full blocks to the trie, beyond which no row has anything of its own. So tokens are counted in
    whole blocks here, and are not those that rows generate.
    """

    holds_tokens = False

    @classmethod
    def of(cls, blocks: Sequence[int], block_size: int) -> EncoderBlockTrie:
        """What one row holds, that of a group which is to fan out."""
        return cls(block_size, blocks, len(blocks) * block_size)

    def fan_out(self, paths: np.ndarray, new_blocks: Sequence[int]) -> np.ndarray:
        """Let one row become as many as there are paths; all hold the same blocks. No copies."""
        return super().fan_out(paths[:, :0], new_blocks)

    def blocks_to_grow(self) -> int:
        """None."""
        return 0

    def grow(self, new_blocks: Sequence[int]) -> None:
        """Rows have one token more, which is not here."""
        assert not len(new_blocks)

    def fork(self, parents: np.ndarray, num_tokens: int | None = None) -> None:
        """What rows continue makes no difference: they hold the same."""
