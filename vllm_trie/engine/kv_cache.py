"""KV blocks of beam groups, next to vLLM's own requests in one pool.

Until its prefix is computed, its prompt and what its beams have in common, a group is an ordinary
request of vLLM's KV cache manager. Then its block tries, one per KV cache group of the model, take its
blocks over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, KVCacheBlockCopy
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request, RequestStatus

from vllm_trie.messages import LookaheadBlocks, RowBlocks
from vllm_trie.trie.blocks import BlockCopy, BlockCounts, BlockTrie, blocks_to_fan_out


@dataclass(slots=True)
class RowUpdate:
    """What the rows of a group got in this step."""

    rows: list[RowBlocks] | None = None  # where it fans out: all blocks of each row
    new_blocks: list[RowBlocks] | None = None  # else, at a block boundary: the next blocks of each row


@dataclass(slots=True)
class _GroupBlocks:
    prefix_length: int  # tokens that the group computes as one row
    paths: list[list[int]]  # what its rows compute after it fans out, see `BlockTrie.fan_out`
    is_prefilling: bool = False
    tries: list[BlockTrie] = field(default_factory=list)  # by KV cache group, once it has fanned out
    steps: int = 0
    update: RowUpdate | None = None
    copies: list[BlockCopy] = field(default_factory=list)  # not yet sent
    next_blocks: list[list[int]] = field(default_factory=list)  # lookahead of its rows, by KV cache group
    spare_blocks: list[int] = field(default_factory=list)  # lookahead of rows that last one step

    @property
    def lookahead_blocks(self) -> list[int]:
        return [block for blocks in (*self.next_blocks, self.spare_blocks) for block in blocks]


class BeamKVCacheManager(KVCacheManager):
    """vLLM's KV cache manager, with a block trie per decoding beam group and KV cache group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reclaim_interval = 1
        self.num_lookahead_tokens = 0  # for which vLLM keeps room beyond what an ordinary request computes
        self.counts = BlockCounts()  # of groups that have ended
        self._groups: dict[str, _GroupBlocks] = {}
        self.num_group_blocks = 0  # that tries hold, their garbage included
        self.peak_group_blocks = 0

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
        return sum(trie.num_live_blocks for group in self._groups.values() for trie in group.tries)

    def announce(self, request_id: str, prefix_length: int, paths: list[list[int]]) -> int:
        """A group will fan out once `prefix_length` tokens are computed, now or after a preemption.

        Args:
            paths: What its rows compute then, see `BlockTrie.fan_out`.

        Returns:
            How many blocks it needs to get that far.
        """
        self._groups[request_id] = _GroupBlocks(prefix_length, paths)
        prefix = self._blocks_of_prefix(prefix_length) + self._blocks_to_fan_out(self._groups[request_id])
        return max(prefix, self._blocks_of_prefix(prefix_length + self.num_lookahead_tokens))

    def _blocks_of_prefix(self, num_tokens: int) -> int:
        total = 0
        for manager in self._managers:
            blocks = -(-num_tokens // manager.block_size)
            most = manager.max_admission_blocks_per_request  # of a window and the chunk that is computed
            total += blocks if most is None else min(blocks, most)
        return total

    def can_resume(self, prefix_length: int, num_tokens: int) -> bool:
        """Whether rows of `num_tokens` tokens still hold all that comes after their common prefix.

        If not, they would need more blocks to compute it again than they had: what left the window.
        """
        return all(_skipped(m, num_tokens) <= prefix_length // m.block_size for m in self._managers)

    def _blocks_to_fan_out(self, group: _GroupBlocks) -> int:
        return sum(blocks_to_fan_out(group.prefix_length, group.paths, m.block_size) for m in self._managers)

    def close_group(self, request_id: str) -> None:
        """Forget a group whose blocks are freed."""
        group = self._groups.pop(request_id)
        assert not group.tries, f"group {request_id} closed with its blocks held"

    def take_update(self, request_id: str) -> RowUpdate | None:
        """What `allocate_slots` gave to the rows of a group in this step."""
        group = self._groups[request_id]
        update, group.update = group.update, None
        return update

    def allocate_lookahead(
        self, request: Request, num_layers: int, least_rows: int, most_rows: int
    ) -> LookaheadBlocks | None:
        """Blocks to speculate with in the step that `allocate_slots` has just made room for, out of what is free.

        Args:
            num_layers: Tokens that each row may compute beyond its newest one.
            least_rows, most_rows: Rows beyond the group's own.

        Returns:
            As much of it as there is; None if the rows cannot even grow, or `least_rows` cannot come with them.
        """
        group = self._groups[request.request_id]
        left = [-trie.num_tokens % trie.block_size for trie in group.tries]  # tokens for which the rows have room
        num_free = self.block_pool.get_num_free_blocks()
        for most_layers in sorted({num_layers, *(n for n in left if 0 < n < num_layers)}, reverse=True):
            needs_next = [most_layers > n for n in left]
            num_next = len(group.paths) * sum(needs_next)
            num_rows = min(most_rows, (num_free - num_next) // (len(left) + sum(needs_next)))
            if num_rows >= least_rows and num_next <= num_free:
                group.next_blocks = [self._take(len(group.paths) if needs else 0) for needs in needs_next]
                rows = [tuple(self._take(1 + needs) for needs in needs_next) for _ in range(num_rows)]
                group.spare_blocks = [block for row in rows for blocks in row for block in blocks]
                return LookaheadBlocks(most_layers, rows, [list(blocks) for blocks in group.next_blocks])
        return None

    def replay_forks(self, request_id: str, forks: list[list[int]], num_tokens: int) -> None:
        """Replay the forks of one or more steps. The worker has made their copies already.

        Args:
            forks: For each step the parent of each row. Steps after the first write into lookahead blocks, and what is
                left of these goes back.
            num_tokens: That each row held at the first of these forks. Rows may have grown since.
        """
        group = self._groups[request_id]
        for index, parents in enumerate(forks):
            group.steps += 1
            for number, trie in enumerate(group.tries):
                if index > 0:
                    lookahead, count = group.next_blocks[number], trie.blocks_to_grow()
                    trie.grow(lookahead[:count])
                    del lookahead[:count]
                trie.fork(parents, num_tokens + index)
                if group.steps % self.reclaim_interval == 0:
                    self._reclaim(trie)
        self._take_back(group)

    def allocate_slots(self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        group = self._groups.get(request.request_id)
        if group is not None and request.num_computed_tokens >= group.prefix_length:
            has_room = self._grow(request, num_new_tokens, group) if group.tries else self._fan_out(request, group)
            return self.empty_kv_cache_blocks if has_room else None
        if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            about_to_fan_out = [g for g in self._groups.values() if g.is_prefilling]
            if group is not None:
                about_to_fan_out.append(group)
            reserved = sum(map(self._blocks_to_fan_out, about_to_fan_out))
            kwargs["reserved_blocks"] = kwargs.get("reserved_blocks", 0) + reserved
        blocks = super().allocate_slots(request, num_new_tokens, *args, **kwargs)
        if blocks is None and self._reclaim_all():
            blocks = super().allocate_slots(request, num_new_tokens, *args, **kwargs)
        if blocks is not None and group is not None:
            group.is_prefilling = True
        return blocks

    def free(self, request: Request, **kwargs: Any) -> None:
        group = self._groups.get(request.request_id)
        if group is None or not group.tries:
            super().free(request, **kwargs)
        for trie in group.tries if group is not None else ():
            self._free_blocks(trie.release())
            self.counts.add(trie.counts)
        if group is not None:
            self._take_back(group)
            self._groups[request.request_id] = _GroupBlocks(group.prefix_length, group.paths)

    def cache_blocks(self, request: Request, num_computed_tokens: int, **kwargs: Any) -> None:
        group = self._groups.get(request.request_id)
        if group is not None:
            if group.tries:  # which hold the prefix's blocks now; vLLM cached them when it computed them
                return
            # Beyond the prefix a request's tokens are no row's history.
            num_computed_tokens = min(num_computed_tokens, group.prefix_length)
        super().cache_blocks(request, num_computed_tokens, **kwargs)

    def estimate_cached_tokens(self, request: Request, **kwargs: Any) -> int:
        group = self._groups.get(request.request_id)
        if group is None or not group.tries:
            return super().estimate_cached_tokens(request, **kwargs)
        block_size = max(trie.block_size for trie in group.tries)
        return request.num_prompt_tokens // block_size * block_size if self.enable_caching else 0

    def take_kv_cache_block_copies(self, **kwargs: Any) -> tuple[list[KVCacheBlockCopy], list[KVCacheBlock]]:
        copies, retained = super().take_kv_cache_block_copies(**kwargs)
        for group in self._groups.values():
            copies += [KVCacheBlockCopy(*copy) for copy in group.copies]
            group.copies.clear()
        return copies, retained

    def total_counts(self) -> BlockCounts:
        """What all tries, ended or not, have done so far."""
        total = BlockCounts()
        for counts in (self.counts, *(trie.counts for group in self._groups.values() for trie in group.tries)):
            total.add(counts)
        return total

    def check_invariants(self) -> None:
        """Raise AssertionError unless every block a trie holds is held once by the pool, for it alone."""
        tries = [trie for group in self._groups.values() for trie in group.tries]
        num_held = sum(trie.num_live_blocks + trie.num_garbage for trie in tries)
        assert self.num_group_blocks == num_held + sum(len(group.lookahead_blocks) for group in self._groups.values())
        for request_id, group in self._groups.items():
            assert not group.tries or not any(m.req_to_blocks.get(request_id) for m in self._managers)
            for trie in group.tries:
                trie.check_invariants()
                for row in range(trie.width):
                    for block_id in trie.row_blocks(row):
                        assert self.block_pool.blocks[block_id].ref_cnt > 0, f"block {block_id} of {request_id} is free"

    @property
    def _managers(self) -> tuple[SingleTypeKVCacheManager, ...]:
        return self.coordinator.single_type_managers

    def _fan_out(self, request: Request, group: _GroupBlocks) -> bool:
        """Let the one row become all rows, with room for what they compute. Returns False if blocks are short."""
        num_tokens = request.num_computed_tokens
        self.coordinator.remove_skipped_blocks(request.request_id, num_tokens)
        new_blocks = self._new_blocks(blocks_to_fan_out(num_tokens, group.paths, m.block_size) for m in self._managers)
        if new_blocks is None:
            return False
        for manager, blocks in zip(self._managers, new_blocks, strict=True):
            held = manager.req_to_blocks[request.request_id]
            num_held = -(-num_tokens // manager.block_size)
            self.block_pool.free_blocks(held[num_held:])  # vLLM keeps room for the drafts of ordinary requests
            del held[num_held:]
            num_skipped = next((i for i, block in enumerate(held) if not block.is_null), len(held))
            trie = BlockTrie(manager.block_size, [block.block_id for block in held], num_tokens, num_skipped)
            self._count(trie.num_live_blocks)
            group.copies += trie.fan_out(group.paths, blocks)
            group.tries.append(trie)
        self.coordinator.pop_blocks_for_free(request.request_id)
        group.is_prefilling = False
        null = self.block_pool.null_block.block_id
        rows = [
            tuple([null] * trie.num_skipped + trie.row_blocks(row) for trie in group.tries)
            for row in range(len(group.paths))
        ]
        group.update = RowUpdate(rows=rows)
        return True

    def _grow(self, request: Request, num_new_tokens: int, group: _GroupBlocks) -> bool:
        """Make room for the next tokens of every row. Returns False if blocks are short."""
        num_tokens = request.num_computed_tokens
        for trie, manager in zip(group.tries, self._managers, strict=True):
            trie.skip(_skipped(manager, num_tokens))
        group.update = update = RowUpdate()
        if num_tokens + num_new_tokens <= group.tries[0].num_tokens:
            return True  # after a preemption rows compute what there was room for from the start
        new_blocks = self._new_blocks(trie.blocks_to_grow() for trie in group.tries)
        if new_blocks is None:
            return False
        for trie, blocks in zip(group.tries, new_blocks, strict=True):
            trie.grow(blocks)
        if any(new_blocks):
            by_row = [[blocks[row : row + 1] for blocks in new_blocks] for row in range(len(group.paths))]
            update.new_blocks = [tuple(row) for row in by_row]
        return True

    def _new_blocks(self, needs: Iterable[int]) -> list[list[int]] | None:
        """Blocks for the tries of a group, by KV cache group; None if there are too few."""
        needs = list(needs)
        if sum(needs) > self.block_pool.get_num_free_blocks():
            self._reclaim_all()
            if sum(needs) > self.block_pool.get_num_free_blocks():
                return None
        return [self._take(need) for need in needs]

    def _take(self, count: int) -> list[int]:
        self._count(count)
        return [block.block_id for block in self.block_pool.get_new_blocks(count)]

    def _take_back(self, group: _GroupBlocks) -> None:
        self._free_blocks(group.lookahead_blocks)
        group.next_blocks, group.spare_blocks = [], []

    def _count(self, num_new: int) -> None:
        self.num_group_blocks += num_new
        self.peak_group_blocks = max(self.peak_group_blocks, self.num_group_blocks)

    def _reclaim(self, trie: BlockTrie) -> int:
        blocks = trie.reclaim()
        self._free_blocks(blocks)
        return len(blocks)

    def _reclaim_all(self) -> int:
        return sum(self._reclaim(trie) for group in self._groups.values() for trie in group.tries)

    def _free_blocks(self, block_ids: list[int]) -> None:
        self.num_group_blocks -= len(block_ids)
        self.block_pool.free_blocks([self.block_pool.blocks[block_id] for block_id in block_ids])


def _skipped(manager: SingleTypeKVCacheManager, num_computed_tokens: int) -> int:
    """How many blocks in front of the next token's window a manager holds no longer."""
    return manager.get_num_skipped_tokens(num_computed_tokens) // manager.block_size
