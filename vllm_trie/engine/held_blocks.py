"""KV blocks of requests that have ended, kept for those that go on from them: the steps of a search by steps.

A request that goes on refers to the full blocks, and vLLM copies the last one for it, as it does where a prefix is
cached up to the middle of a block. Without this it would compute again what follows the last full block.
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
    """What is kept, by the keys that front ends gave to the requests. The pool counts each block as used."""

    block_pool: BlockPool
    _held: dict[str, tuple[list[int], Blocks]] = field(default_factory=dict)  # tokens that are computed, and blocks

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, key: str, request: Request, blocks: Blocks) -> None:
        """Keep the blocks of a request that has ended, as it held them."""
        self.release([key])
        self._held[key] = request.all_token_ids[: request.num_computed_tokens], blocks

    def blocks_for(self, key: str, request: Request, block_size: int) -> tuple[Blocks, int] | None:
        """What a request that goes on from another finds computed: all of its prompt but the last token.

        Returns:
            Blocks, the last of them partly filled or full, and the number of tokens. None where nothing is kept, or
            something else than the request's prompt.
        """
        token_ids, held = self._held.get(key, ([], ()))
        count = request.num_prompt_tokens - 1
        if count < 1 or token_ids[:count] != request.all_token_ids[:count]:
            return None
        return tuple(blocks[: -(-count // block_size)] for blocks in held), count

    def release(self, keys: Iterable[str]) -> int:
        """Give back what is kept under these keys, if there is any. Returns under how many of them there was."""
        released = [self._held.pop(key) for key in keys if key in self._held]
        for _, held in released:
            self.block_pool.free_blocks([*chain.from_iterable(map(reversed, held))])
        return len(released)

    def release_all(self) -> int:
        """Give everything back. Returns how many requests it was of."""
        return self.release(list(self._held))
