"""KV blocks of requests that have ended, kept for those that go on from them: the steps of a search by steps.

A request that goes on refers to the full blocks, and vLLM copies the last one for it, as it does where a prefix is
cached up to the middle of a block. Without this it would compute again what follows the last full block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

Blocks = tuple[list[KVCacheBlock], ...]  # by KV cache group


class _Held(NamedTuple):
    token_ids: list[int]  # that are computed
    blocks: Blocks


@dataclass
class HeldBlocks:
    """What is kept, by the keys that front ends gave to the requests. The pool counts each block as used."""

    block_pool: BlockPool
    _held: dict[str, _Held] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, key: str, request: Request, blocks: Blocks) -> None:
        """Keep the blocks of a request that has ended, as it held them."""
        self.release([key])
        self._held[key] = _Held(request.all_token_ids[: request.num_computed_tokens], blocks)

    def blocks_for(self, key: str, request: Request, block_size: int) -> tuple[Blocks, int] | None:
        """What a request that goes on from another finds computed: all of its prompt but the last token.

        Returns:
            Blocks, the last of them partly filled or full, and the number of tokens. None where nothing is kept, or
            something else than the request's prompt.
        """
        held, count = self._held.get(key), request.num_prompt_tokens - 1
        if held is None or count < 1 or held.token_ids[:count] != request.all_token_ids[:count]:
            return None
        return tuple(blocks[: -(-count // block_size)] for blocks in held.blocks), count

    def release(self, keys: Iterable[str]) -> int:
        """Give back what is kept under these keys, if there is any. Returns under how many of them there was."""
        count = 0
        for key in keys:
            if (held := self._held.pop(key, None)) is not None:
                self.block_pool.free_blocks([*chain.from_iterable(reversed(blocks) for blocks in held.blocks)])
                count += 1
        return count

    def release_all(self) -> int:
        """Give everything back. Returns how many requests it was of."""
        return self.release(list(self._held))
