"""KV blocks of beam groups, next to vLLM's own requests in one pool.

Until its prompt is prefilled a group is an ordinary request of vLLM's KV cache manager. Then its
block trie takes its blocks over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, KVCacheBlockCopy
from vllm.v1.request import Request, RequestStatus

from vllm_trie.trie.blocks import BlockCopy, BlockCounts, BlockTrie


@dataclass(slots=True)
class RowUpdate:
    """What the rows of a group got in this step."""

    rows: list[list[int]] | None = None  # on widening: all blocks of each row
    new_blocks: list[int] | None = None  # else, at a block boundary: one block per row


@dataclass(slots=True)
class _GroupBlocks:
    width: int
    blocks_to_start: int  # what widening to `width` rows will take
    is_prefilling: bool = False
    trie: BlockTrie | None = None
    steps: int = 0
    update: RowUpdate | None = None
    copies: list[BlockCopy] = field(default_factory=list)  # not yet sent


class BeamKVCacheManager(KVCacheManager):
    """vLLM's KV cache manager, with a block trie per decoding beam group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reclaim_interval = 1
        self.counts = BlockCounts()  # of groups that have ended
        self._groups: dict[str, _GroupBlocks] = {}
        self.num_group_blocks = 0  # that tries hold, their garbage included
        self.peak_group_blocks = 0
        self.shortage = (0, 0)  # blocks needed and blocks free when the last group could not grow

    @property
    def block_size(self) -> int:
        return self.coordinator.single_type_managers[0].block_size

    @property
    def num_usable_blocks(self) -> int:
        """Blocks of the pool, its null block not counted."""
        return self.block_pool.num_gpu_blocks - 1

    @property
    def num_used_blocks(self) -> int:
        """Blocks of the pool that are in use, by groups or by ordinary requests."""
        return self.num_usable_blocks - self.block_pool.get_num_free_blocks()

    @property
    def num_live_group_blocks(self) -> int:
        """Blocks that rows of decoding groups lead to; what else groups hold waits to be reclaimed."""
        return sum(group.trie.num_live_blocks for group in self._groups.values() if group.trie is not None)

    def open_group(self, request: Request, width: int) -> None:
        """Announce that this request will widen to `width` rows once its prompt is prefilled."""
        partial = request.num_prompt_tokens % self.block_size > 0
        self._groups[request.request_id] = _GroupBlocks(width, width - partial)

    def close_group(self, request_id: str) -> None:
        """Forget a group whose blocks are freed."""
        group = self._groups.pop(request_id)
        assert group.trie is None, f"group {request_id} closed with its blocks held"

    def take_update(self, request_id: str) -> RowUpdate | None:
        """What `allocate_slots` gave to the rows of a group in this step."""
        group = self._groups[request_id]
        update, group.update = group.update, None
        return update

    def fork(self, request_id: str, parents: list[int]) -> None:
        """Replay a step's forks. The copies of tail blocks are the worker's: it has made them already."""
        group = self._groups[request_id]
        assert group.trie is not None
        group.trie.fork(parents)
        group.steps += 1
        if group.steps % self.reclaim_interval == 0:
            self._reclaim(group.trie)

    def allocate_slots(self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        group = self._groups.get(request.request_id)
        if group is not None and request.num_computed_tokens >= request.num_prompt_tokens:
            return self._allocate_rows(request, group)
        if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            starting = sum(g.blocks_to_start for g in self._groups.values() if g.is_prefilling)
            own = group.blocks_to_start if group is not None else 0
            kwargs["reserved_blocks"] = kwargs.get("reserved_blocks", 0) + starting + own
        blocks = super().allocate_slots(request, num_new_tokens, *args, **kwargs)
        if blocks is None and self._reclaim_all():
            blocks = super().allocate_slots(request, num_new_tokens, *args, **kwargs)
        if blocks is not None and group is not None:
            group.is_prefilling = True
        return blocks

    def free(self, request: Request) -> None:
        group = self._groups.get(request.request_id)
        if group is None or group.trie is None:
            super().free(request)
        else:
            self._free_blocks(group.trie.release())
            self.counts.add(group.trie.counts)
        if group is not None:
            self._groups[request.request_id] = _GroupBlocks(group.width, group.blocks_to_start)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        if request.request_id in self._groups:  # beyond the prompt a request's tokens are no row's history
            num_computed_tokens = min(num_computed_tokens, request.num_prompt_tokens)
        super().cache_blocks(request, num_computed_tokens)

    def estimate_cached_tokens(self, request: Request) -> int:
        group = self._groups.get(request.request_id)
        if group is None or group.trie is None:
            return super().estimate_cached_tokens(request)
        return request.num_prompt_tokens // self.block_size * self.block_size if self.enable_caching else 0

    def take_kv_cache_block_copies(self) -> tuple[list[KVCacheBlockCopy], list[KVCacheBlock]]:
        copies, retained = super().take_kv_cache_block_copies()
        for group in self._groups.values():
            copies += [KVCacheBlockCopy(*copy) for copy in group.copies]
            group.copies.clear()
        return copies, retained

    def total_counts(self) -> BlockCounts:
        """What all tries, ended or not, have done so far."""
        total = BlockCounts()
        for counts in (self.counts, *(g.trie.counts for g in self._groups.values() if g.trie is not None)):
            total.add(counts)
        return total

    def check_invariants(self) -> None:
        """Raise AssertionError unless every block a trie holds is held once by the pool, for it alone."""
        tries = [group.trie for group in self._groups.values() if group.trie is not None]
        assert self.num_group_blocks == sum(trie.num_live_blocks + trie.num_garbage for trie in tries)
        for request_id, group in self._groups.items():
            if group.trie is None:
                continue
            group.trie.check_invariants()
            assert not any(m.req_to_blocks.get(request_id) for m in self.coordinator.single_type_managers)
            for row in range(group.trie.width):
                for block_id in group.trie.row_blocks(row):
                    assert self.block_pool.blocks[block_id].ref_cnt > 0, f"block {block_id} of {request_id} is free"

    def _allocate_rows(self, request: Request, group: _GroupBlocks) -> KVCacheBlocks | None:
        """One more slot in every row; the first time, widen the prompt's one row to b."""
        trie, widening = group.trie, group.trie is None
        if trie is None:
            (prompt_blocks,) = self.coordinator.get_blocks(request.request_id)
            block_ids = [block.block_id for block in prompt_blocks]
            trie = BlockTrie(self.block_size, block_ids, request.num_prompt_tokens)
        need = group.blocks_to_start if widening else trie.blocks_to_grow()
        if need > self.block_pool.get_num_free_blocks():
            self._reclaim_all()
            if need > self.block_pool.get_num_free_blocks():
                self.shortage = (need, self.block_pool.get_num_free_blocks())
                return None
        new_blocks = [block.block_id for block in self.block_pool.get_new_blocks(need)] if need else []
        if widening:
            self.coordinator.pop_blocks_for_free(request.request_id)
            self.num_group_blocks += len(block_ids)
            group.trie, group.is_prefilling = trie, False
            to_widen = trie.blocks_to_widen(group.width)
            group.copies = trie.widen(group.width, new_blocks[:to_widen])
            trie.grow(new_blocks[to_widen:])
            group.update = RowUpdate(rows=[trie.row_blocks(row) for row in range(group.width)])
        else:
            trie.grow(new_blocks)
            group.update = RowUpdate(new_blocks=new_blocks or None)
        self.num_group_blocks += need
        self.peak_group_blocks = max(self.peak_group_blocks, self.num_group_blocks)
        return self.empty_kv_cache_blocks

    def _reclaim(self, trie: BlockTrie) -> int:
        blocks = trie.reclaim()
        self._free_blocks(blocks)
        return len(blocks)

    def _reclaim_all(self) -> int:
        return sum(self._reclaim(group.trie) for group in self._groups.values() if group.trie is not None)

    def _free_blocks(self, block_ids: list[int]) -> None:
        self.num_group_blocks -= len(block_ids)
        self.block_pool.free_blocks([self.block_pool.blocks[block_id] for block_id in block_ids])
