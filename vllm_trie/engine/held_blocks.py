"""Holds the KV blocks of finished steps in a search by steps, for the candidates that continue them.

A continuing request shares the full blocks, and vLLM copies the last one for it, as it does for a prefix that is cached
up to the middle of a block. Otherwise it would compute the tokens after the last full block again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

Blocks = tuple[list[KVCacheBlock], ...]  # by KV cache group


@dataclass
class EngineHeldBlocks:
    """Held blocks, by the keys that front ends gave to the requests. The pool counts these blocks as used."""

    block_pool: BlockPool
    _held: dict[str, tuple[list[int], Blocks]] = field(default_factory=dict)  # computed tokens, and blocks

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, key: str, request: Request, blocks: Blocks) -> None:
        """Hold the blocks of a request that has ended."""
        self.release([key])
        self._held[key] = request.all_token_ids[: request.num_computed_tokens], blocks

    def blocks_for(self, key: str, request: Request, block_size: int) -> tuple[Blocks, int] | None:
        """The blocks of all prompt tokens but the last, for a request that continues another.

        Returns:
            Blocks, the last one full or partly filled, and the number of tokens. None if no blocks are held under this
            key, or blocks of other tokens than the request's prompt.
        """
        token_ids, held = self._held.get(key, ([], ()))
        count = request.num_prompt_tokens - 1
        if count < 1 or token_ids[:count] != request.all_token_ids[:count]:
            return None
        return tuple(blocks[: -(-count // block_size)] for blocks in held), count

    def release(self, keys: Iterable[str]) -> int:
        """Free the blocks under these keys. Returns how many of the keys had blocks."""
        released = [self._held.pop(key) for key in keys if key in self._held]
        for _, held in released:
            self.block_pool.free_blocks([*chain.from_iterable(map(reversed, held))])
        return len(released)

    def release_all(self) -> int:
        """Free all held blocks. Returns how many keys had blocks."""
        return self.release(list(self._held))
