"""Which blocks of a row count as entered in vLLM's prefix cache."""

from __future__ import annotations

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from vllm_trie.engine.kv_cache import _hashed_group_blocks

BLOCK_SIZE = 32


def block(number: int, num_tokens: int | None) -> KVCacheBlock:
    """One whose hash covers the first tokens of its request, if it has a hash."""
    made = KVCacheBlock(number)
    if num_tokens is not None:
        made.set_block_hash(make_block_hash_with_group_id(BlockHash(bytes([number])), 0), num_tokens)
    return made


def test_a_block_counts_if_its_hash_covers_all_of_it() -> None:
    """Not the last block of a prompt, which vLLM enters by its beginning where others have smaller blocks."""
    path = [block(1, 32), block(2, 64), block(3, 80), block(4, None)]
    assert _hashed_group_blocks(path, BLOCK_SIZE) == [1, 2]
    assert _hashed_group_blocks([*path[:2], block(3, 96)], BLOCK_SIZE) == [1, 2, 3]
