"""vLLM's KV cache manager with beam groups, whose blocks come from the same pool as those of ordinary requests.

Until its prefix is computed (its prompt, and after a preemption what its beams have in common), a group is an ordinary
request of vLLM's KV cache manager. Then its block tries, one per KV cache group of the model, take over its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import CrossAttentionManager, SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus

from vllm_trie.compat.at_rest import RestsWithoutBeams
from vllm_trie.engine.held_blocks import EngineHeldBlocks
from vllm_trie.messages import ForkTicketMessage, NewRows
from vllm_trie.trie.blocks import BlockTrie, TrieBlockCounts, trie_fan_out_blocks

SHARED_SPECS = FullAttentionSpec, SlidingWindowSpec, CrossAttentionSpec  # layers read shared blocks once for all rows


@dataclass(slots=True)
class RowUpdate:
    """The blocks that the rows of a group got in this step."""

    rows: NewRows | None = None  # if it fans out
    new_blocks: list[np.ndarray] | None = None  # otherwise, at a block boundary: see `GroupStep`
    num_shared: list[int] = field(default_factory=list)  # see `GroupStep`


@dataclass(slots=True)
class _GroupKVBlocks:
    prefix_length: int  # tokens that the group computes as one row
    paths: np.ndarray  # keys of the tokens that its rows compute after it fans out, see `BlockTrie.fan_out`
    tries: list[BlockTrie] = field(default_factory=list)  # by KV cache group, once it has fanned out
    of_tokens: BlockTrie = field(init=False)  # the first of `tries` that holds tokens
    steps: int = 0
    update: RowUpdate | None = None
    next_blocks: list[list[int]] = field(default_factory=list)  # lookahead of its rows, by KV cache group
    spare_blocks: list[list[int]] = field(default_factory=list)  # lookahead of any rows, by KV cache group

    @property
    def lookahead_blocks(self) -> list[int]:
        return [block for blocks in (*self.next_blocks, *self.spare_blocks) for block in blocks]

    @property
    def num_held(self) -> int:
        """Blocks that only its rows have, including those to be reclaimed."""
        return sum(trie.num_held for trie in self.tries) + len(self.lookahead_blocks)


class BeamKVCacheManager(RestsWithoutBeams, KVCacheManager):
    """vLLM's KV cache manager, with a block trie per decoding beam group and KV cache group.

    The scheduler lets it rest; it wakes when there are groups or held blocks.
    """

    hooks = ("allocate_slots", "cache_blocks")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._managers: tuple[SingleTypeKVCacheManager, ...] = self.coordinator.single_type_managers
        # The KV cache groups in which rows give up blocks: of windows and recurrent states.
        self._skipping = [n for n, m in enumerate(self._managers) if _manager_blocks_skipped(m, self.max_model_len)]
        self.reclaim_interval = 1
        self.num_lookahead_tokens = 0  # for drafts of ordinary requests, for which vLLM keeps room
        self.counts = TrieBlockCounts()  # of groups that have ended
        self._groups: dict[str, _GroupKVBlocks] = {}
        self._started: dict[str, _GroupKVBlocks] = {}  # those of `_groups` that have blocks: far more may be queued
        self.num_group_blocks = 0  # held by tries, including blocks that no beam uses any more
        self.peak_group_blocks = 0
        self._taken_blocks: list[int] | None = None  # only with a KV connector
        self.free_written = _free_at_once(self.block_pool)  # frees blocks of a request, which a running step may write
        self.held = EngineHeldBlocks(self.block_pool)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks of the pool without its null block."""
        return self.block_pool.num_gpu_blocks - 1

    @property
    def token_block_size(self) -> int:
        """Tokens of a block, in the first KV cache group that holds tokens."""
        return next(m.block_size for m in self._managers if not isinstance(m, CrossAttentionManager))

    def announce(self, request: Request, paths: np.ndarray) -> int:
        """Register a group, new or preempted, that will fan out once all tokens of its request are computed.

        Args:
            paths: Keys of the tokens that its rows compute then, see `BlockTrie.fan_out`.

        Returns:
            How many blocks it needs until it has fanned out: vLLM keeps room for drafts after a prefix, too.
        """
        self.wake()
        self._groups[request.request_id] = group = _GroupKVBlocks(request.num_tokens, paths)
        num_encoded = sum(map(request.get_num_encoder_embeds, range(len(request.mm_features))))
        num_tokens = min(request.num_tokens + self.num_lookahead_tokens, self.max_model_len)
        return self._blocks_of_prefix(num_tokens, num_encoded) + self._blocks_to_fan_out(group)

    def _blocks_of_prefix(self, num_tokens: int, num_encoded: int) -> int:
        """Blocks of a request with so many tokens in the decoder and so many encoder outputs."""
        total = 0
        for manager in self._managers:
            num_held = num_encoded if isinstance(manager, CrossAttentionManager) else num_tokens
            blocks = -(-num_held // manager.block_size)
            most = _manager_blocks_at_most(manager)
            total += blocks if most is None else min(blocks, most)
        return total

    def can_resume(self, prefix_length: int, num_tokens: int) -> bool:
        """Whether rows of `num_tokens` tokens still hold all blocks after their common prefix.

        If not, computing them again would take more blocks than the rows had, as some have left the window.
        """
        return all(_manager_blocks_skipped(m, num_tokens) <= prefix_length // m.block_size for m in self._managers)

    def _blocks_to_fan_out(self, group: _GroupKVBlocks) -> int:
        return sum(_manager_blocks_beyond(m, group.prefix_length, group.paths) for m in self._managers)

    def _blocks_to_fan_out_soon(self, starting: _GroupKVBlocks | None = None) -> int:
        soon = [group for group in self._started.values() if not group.tries and group is not starting]
        return sum(map(self._blocks_to_fan_out, soon if starting is None else [*soon, starting]))

    def most_blocks_of_next_step(self, num_rows: int) -> int:
        """The most blocks that so many decoding rows take in the next step, one each, and what groups need to fan out.

        Chunks of prompts are left out.
        """
        return num_rows * len(self._managers) + self._blocks_to_fan_out_soon()

    def close_group(self, request_id: str) -> None:
        """Forget a group whose blocks are freed."""
        group = self._groups.pop(request_id)
        self._started.pop(request_id, None)  # a load may still write its blocks: they are freed later
        assert not group.tries, f"group {request_id} closed with its blocks held"

    def take_update(self, request_id: str) -> RowUpdate | None:
        """The blocks that `allocate_slots` gave to the rows of a group, and how many leading tokens all rows share.

        Tokens that have left a window count as shared, and so do all encoder outputs.
        """
        group = self._groups[request_id]
        if (update := group.update) is None:
            return None
        group.update = None
        for trie, manager in zip(group.tries, self._managers, strict=True):
            is_shared = isinstance(manager.kv_cache_spec, SHARED_SPECS)
            update.num_shared.append(trie.num_common() * trie.block_size if is_shared else 0)
        return update

    def count_blocks(self, request_id: str) -> tuple[int, int]:
        """How many KV blocks the rows of a decoding group hold, and how many leading blocks all of them share.

        In the first KV cache group that holds tokens; blocks that have left a window count as shared but not held.
        """
        trie = self._groups[request_id].of_tokens
        return trie.num_live_blocks, trie.num_common()

    def tries_of(self, request_id: str) -> Sequence[BlockTrie]:
        """The block tries of a decoding group, by KV cache group."""
        return self._groups[request_id].tries

    def lend(
        self, request_id: str, num_next: list[int], num_spare: list[int]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Lend free blocks to a group, into which it writes drafts. `replay_forks` keeps those that its rows fill.

        Args:
            num_next: By KV cache group, how many of its rows may fill next; in order.
            num_spare: By KV cache group, how many any rows may fill.

        Returns:
            Both, by KV cache group.
        """
        group = self._groups[request_id]
        group.next_blocks, group.spare_blocks = [*map(self._take, num_next)], [*map(self._take, num_spare)]
        return [[*blocks] for blocks in group.next_blocks], group.spare_blocks

    def replay_forks(self, request_id: str, forks: list[np.ndarray], num_tokens: int) -> None:
        """Replay the forks of one or more steps. The worker has already copied the blocks.

        Args:
            forks: For each step [rows] the parent of each row. Steps after the first write into lookahead blocks;
                unused ones are freed.
            num_tokens: Tokens of each row at the first of these forks. Rows may have grown since.
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
        if group.next_blocks:
            self._take_back(group)

    def get_computed_blocks(self, request: Request, *args: Any, **kwargs: Any) -> tuple[KVCacheBlocks, int, int]:
        is_bounded = any(bound is not None for bound in (*args, *kwargs.values()))  # 0.33, if other outputs are kept
        ticket = ForkTicketMessage.of(request.sampling_params) if self.held and not is_bounded else None
        if ticket is not None and ticket.parent is not None:
            found = self.held.blocks_for(ticket.parent, request, self._managers[0].block_size)
            if found is not None:
                return self.create_kv_cache_blocks(found[0]), found[1], 0
        return super().get_computed_blocks(request, *args, **kwargs)

    def allocate_slots(self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        group = self._groups.get(request.request_id)
        if group is not None and request.num_computed_tokens >= group.prefix_length:
            has_room = self._grow(request, num_new_tokens, group) if group.tries else self._fan_out(request, group)
            return self.empty_kv_cache_blocks if has_room else None
        if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            reserved = self._blocks_to_fan_out_soon(group)
            kwargs["reserved_blocks"] = kwargs.get("reserved_blocks", 0) + reserved
        blocks = super().allocate_slots(request, num_new_tokens, *args, **kwargs)
        if blocks is None and self._reclaim_all():
            blocks = super().allocate_slots(request, num_new_tokens, *args, **kwargs)
        if blocks is not None and group is not None:
            self._started[request.request_id] = group
        return blocks

    def free(self, request: Request, **kwargs: Any) -> None:
        group = self._groups.get(request.request_id)
        if group is None and self._holds(request):
            return
        if group is None or not group.tries:
            super().free(request, **kwargs)
        if group is not None:
            self.block_pool.free_blocks(self._release(request.request_id, group))

    def pop_blocks_for_free(self, request: Request, **kwargs: Any) -> list[KVCacheBlock]:
        popped, group = super().pop_blocks_for_free(request, **kwargs), self._groups.get(request.request_id)
        return popped if group is None else popped + self._release(request.request_id, group)[::-1]

    def _release(self, request_id: str, group: _GroupKVBlocks) -> list[KVCacheBlock]:
        """Drop the rows of a group. Returns their blocks, to be freed in this order."""
        block_ids = group.lookahead_blocks
        for trie in group.tries:
            block_ids += trie.release()
            self.counts.add(trie.counts)
        self.num_group_blocks -= len(block_ids)
        self._groups[request_id] = _GroupKVBlocks(group.prefix_length, group.paths)
        self._started.pop(request_id, None)
        return [self.block_pool.blocks[block_id] for block_id in block_ids]

    def has_fanned_out(self, request_id: str) -> bool:
        """Whether a request is a group that has fanned out into rows."""
        group = self._groups.get(request_id)
        return group is not None and bool(group.tries)

    def record_taken_blocks(self) -> None:
        """Start to record the blocks that rows take, for `pop_taken_blocks`."""
        self._taken_blocks = []

    def pop_taken_blocks(self) -> list[int]:
        """The blocks that rows have taken since the last call, whoever used them before."""
        assert self._taken_blocks is not None
        taken, self._taken_blocks = self._taken_blocks, []
        return taken

    def leave_prompt(self, request: Request) -> list[KVCacheBlock]:
        """Turn a group that has fanned out back into an ordinary request that holds only its prompt.

        Returns:
            All other blocks of its rows, to be freed in this order.
        """
        request_id, group = request.request_id, self._groups[request.request_id]
        for trie, manager in zip(group.tries, self._managers, strict=True):
            # All rows begin with the prompt; take it from the first.
            prompt = self._row_path(trie, 0, -(-request.num_prompt_tokens // trie.block_size))
            manager.req_to_blocks[request_id] = prompt
        kept = {block.block_id for manager in self._managers for block in manager.req_to_blocks[request_id]}
        return [block for block in self._release(request_id, group) if block.block_id not in kept]

    def block_ids_of(self, request_id: str) -> set[int]:
        """All blocks that a request holds, or the rows of a group."""
        tries = self._groups[request_id].tries if request_id in self._groups else []
        tables = [np.unique(trie.table()).tolist() for trie in tries] or self.get_block_ids(request_id)
        return {*chain.from_iterable(tables)}

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self._release_held()  # their KV was computed with the old weights
        return super().reset_prefix_cache(*args, **kwargs)

    def _holds(self, request: Request) -> bool:
        """Hold the blocks of a step candidate, which the front end aborts when it finds a delimiter."""
        ticket = ForkTicketMessage.of(request.sampling_params)
        if ticket is None or ticket.key is None or request.status != RequestStatus.FINISHED_ABORTED:
            return False
        is_full = all(isinstance(manager.kv_cache_spec, FullAttentionSpec) for manager in self._managers)
        is_full = is_full and len({manager.block_size for manager in self._managers}) == 1
        if not (is_full and self.enable_caching) or self.num_lookahead_tokens:
            return False  # vLLM resumes within a block only with prefix caching; a draft model may lag behind
        blocks = tuple(manager.req_to_blocks.get(request.request_id, []) for manager in self._managers)
        self.coordinator.pop_blocks_for_free(request.request_id)
        self.wake()
        self.held.hold(ticket.key, request, blocks)
        return True

    def cache_blocks(self, request: Request, num_computed_tokens: int, **kwargs: Any) -> None:
        group = self._groups.get(request.request_id)
        if group is not None:
            if group.tries:  # these hold the prefix's blocks now; vLLM cached them when it computed them
                return
            # Beyond the prefix, the request's tokens are not the history of a row.
            num_computed_tokens = min(num_computed_tokens, group.prefix_length)
        super().cache_blocks(request, num_computed_tokens, **kwargs)

    def full_blocks(self, request_id: str, first: int, end: int) -> Iterator[int]:
        """The blocks that tokens `first` to `end` of a request fill; none if it is a group that has fanned out."""
        for manager in self._managers:
            blocks = manager.req_to_blocks.get(request_id, [])
            yield from (block.block_id for block in blocks[first // manager.block_size : end // manager.block_size])

    def cache_row(self, request_id: str, row: int, num_tokens: int, history: Callable[[], Request]) -> None:
        """Enter the full blocks of a row of a decoding group into vLLM's prefix cache, unless they are in it.

        Args:
            request_id: The group.
            row: The number of the row in the group's tries.
            num_tokens: Computed tokens of the row.
            history: Makes a hashed request whose tokens begin with these. Called only if there are blocks to enter.
        """
        tries = self._groups[request_id].tries
        paths = [self._row_path(trie, row, num_tokens // trie.block_size) for trie in tries]
        before = [_hashed_group_blocks(path, trie.block_size) for trie, path in zip(tries, paths, strict=True)]
        if sum(map(len, before)) == sum(not block.is_null for path in paths for block in path):
            return
        for manager, path, hashed in zip(self._managers, paths, before, strict=True):
            # As if vLLM had given them to a request.
            manager.req_to_blocks[request_id], manager.num_cached_block[request_id] = path, max(hashed, default=0)
        super().cache_blocks(history(), num_tokens)
        for trie, path, hashed in zip(tries, paths, before, strict=True):
            trie.counts.cached += len(_hashed_group_blocks(path, trie.block_size)) - len(hashed)
        self.coordinator.pop_blocks_for_free(request_id)

    def _row_path(self, trie: BlockTrie, row: int, num_blocks: int) -> list[KVCacheBlock]:
        """The first blocks of a row, with the null block in place of those that have left its window."""
        held = trie.row_blocks(row)[: max(num_blocks - trie.num_skipped, 0)]
        skipped = [self.block_pool.null_block] * min(trie.num_skipped, num_blocks)
        return skipped + [self.block_pool.blocks[block_id] for block_id in held]

    def estimate_cached_tokens(self, request: Request, **kwargs: Any) -> int:
        group = self._groups.get(request.request_id)
        if group is None or not group.tries:
            return super().estimate_cached_tokens(request, **kwargs)
        block_size = max(trie.block_size for trie in group.tries)
        return request.num_prompt_tokens // block_size * block_size if self.enable_caching else 0

    def total_counts(self) -> TrieBlockCounts:
        """The block counts of all groups so far, running or ended."""
        total = TrieBlockCounts()
        for counts in (self.counts, *(trie.counts for group in self._started.values() for trie in group.tries)):
            total.add(counts)
        return total

    def check_invariants(self) -> None:
        """Raise AssertionError unless tries are consistent and the pool counts each of their blocks as used."""
        assert self.num_group_blocks == sum(group.num_held for group in self._groups.values())
        assert self._started.keys() <= self._groups.keys()
        for request_id, group in self._groups.items():
            assert not group.tries or self._started.get(request_id) is group
            assert not group.tries or not any(m.req_to_blocks.get(request_id) for m in self._managers)
            for trie in group.tries:
                trie.check_invariants()
                for block_id in np.unique(trie.table()).tolist():
                    assert self.block_pool.blocks[block_id].ref_cnt > 0, f"block {block_id} of {request_id} is free"

    def _fan_out(self, request: Request, group: _GroupKVBlocks) -> bool:
        """Fan the group's row out into all rows, with room for what they compute. Returns False if blocks are short."""
        num_tokens = request.num_computed_tokens
        self.coordinator.remove_skipped_blocks(request.request_id, self._num_read(request))
        new_blocks = self._new_blocks([_manager_blocks_beyond(m, num_tokens, group.paths) for m in self._managers])
        if new_blocks is None:
            return False
        null, tables, copies = self.block_pool.null_block.block_id, [], []
        for manager, blocks in zip(self._managers, new_blocks, strict=True):
            trie = self._trie_of(manager, request, num_tokens)
            self._count(trie.num_held)
            copies.append(trie.fan_out(group.paths, blocks))
            group.tries.append(trie)
            tables.append(np.pad(trie.table(), ((0, 0), (trie.num_skipped, 0)), constant_values=null))
        group.of_tokens = next(trie for trie in group.tries if trie.holds_tokens)
        self.coordinator.pop_blocks_for_free(request.request_id)
        group.update = RowUpdate(NewRows(tables, np.concatenate(copies).astype(np.int64)))
        return True

    def _num_read(self, request: Request) -> int:
        """Computed tokens, without those in flight if a KV connector may at once load into blocks that are freed."""
        in_flight = 0 if self._taken_blocks is None else request.num_in_flight_tokens
        return request.num_computed_tokens - in_flight

    def _trie_of(self, manager: SingleTypeKVCacheManager, request: Request, num_tokens: int) -> BlockTrie:
        """A trie of the blocks of a group that is still one row, with so many computed tokens."""
        held = manager.req_to_blocks[request.request_id]
        if isinstance(manager, CrossAttentionManager):
            from vllm_trie.trie.encoder_blocks import EncoderBlockTrie  # here: most engines never need it

            return EncoderBlockTrie.of([block.block_id for block in held], manager.block_size)
        num_held = -(-num_tokens // manager.block_size)
        self.free_written(request, held[num_held:])  # vLLM keeps room for the drafts of ordinary requests
        del held[num_held:]
        num_skipped = next((i for i, block in enumerate(held) if not block.is_null), len(held))
        return BlockTrie(manager.block_size, [block.block_id for block in held], num_tokens, num_skipped)

    def _grow(self, request: Request, num_new_tokens: int, group: _GroupKVBlocks) -> bool:
        """Make room for the next tokens of every row. Returns False if blocks are short."""
        num_tokens = request.num_computed_tokens
        for number in self._skipping:
            manager = self._managers[number]
            num_skipped = _manager_blocks_skipped(manager, self._num_read(request))
            # Rows keep the state after their last full block: the next turn of a chat may resume from it.
            group.tries[number].skip(num_skipped - isinstance(manager.kv_cache_spec, MambaSpec))
        group.update = update = RowUpdate()
        if num_tokens + num_new_tokens <= group.of_tokens.num_tokens:
            return True  # after a preemption, rows already have room for the tokens that they recompute
        needs = [trie.blocks_to_grow() for trie in group.tries]
        new_blocks = self._new_blocks(needs) if any(needs) else [[]] * len(needs)
        if new_blocks is None:
            return False
        for trie, blocks in zip(group.tries, new_blocks, strict=True):
            trie.grow(blocks)
        if any(needs):
            update.new_blocks = [np.array(blocks, np.int32) for blocks in new_blocks]
        return True

    def _new_blocks(self, needs: Sequence[int]) -> list[list[int]] | None:
        """Blocks for the tries of a group, by KV cache group; None if there are too few."""
        if sum(needs) > self.block_pool.get_num_free_blocks():
            self._reclaim_all()
            if sum(needs) > self.block_pool.get_num_free_blocks():
                return None
        blocks = [self._take(need) for need in needs]
        for manager, new in zip(self._managers, blocks, strict=True):
            if manager.records_new_block_ids:  # in models with recurrent states, whose bytes may be NaN to attention
                manager.new_block_ids += new  # vLLM zeroes these before anything is written
        return blocks

    def _take(self, count: int) -> list[int]:
        self._count(count)
        taken = [block.block_id for block in self.block_pool.get_new_blocks(count)]
        if self._taken_blocks is not None:
            self._taken_blocks += taken
        return taken

    def _take_back(self, group: _GroupKVBlocks) -> None:
        self._free_blocks(group.lookahead_blocks)
        group.next_blocks, group.spare_blocks = [], []

    def _count(self, num_new: int) -> None:
        self.num_group_blocks += num_new
        self.peak_group_blocks = max(self.peak_group_blocks, self.num_group_blocks)

    def _reclaim(self, trie: BlockTrie) -> int:
        if blocks := trie.reclaim():
            self._free_blocks(blocks)
        return len(blocks)

    def _reclaim_all(self) -> int:
        reclaimed = sum(self._reclaim(trie) for group in self._started.values() for trie in group.tries)
        return reclaimed + self._release_held()  # candidates that continue these compute a part of a block again

    def _release_held(self) -> int:
        released = self.held.release_all()
        if not self._groups:
            self.rest()
        return released

    def _free_blocks(self, block_ids: list[int]) -> None:
        self.num_group_blocks -= len(block_ids)
        self.block_pool.free_blocks([self.block_pool.blocks[block_id] for block_id in block_ids])


def _free_at_once(block_pool: BlockPool) -> Callable[[Request, list[KVCacheBlock]], None]:
    return lambda _, blocks: block_pool.free_blocks(blocks)


def _hashed_group_blocks(path: Iterable[KVCacheBlock], block_size: int) -> list[int]:
    """The numbers, from 1 on, of a row's blocks that the prefix cache has whole; of others it may have the beginning.

    Where KV cache groups have blocks of different sizes, vLLM enters the last block of a prompt so.
    """
    return [number for number, block in enumerate(path, 1) if (block.block_hash_num_tokens or 0) >= number * block_size]


def _manager_blocks_skipped(manager: SingleTypeKVCacheManager, num_computed_tokens: int) -> int:
    """How many leading blocks are outside the next token's window, and so no longer held."""
    return manager.get_num_skipped_tokens(num_computed_tokens) // manager.block_size


def _manager_blocks_at_most(manager: SingleTypeKVCacheManager) -> int | None:
    """The most blocks that a request of any length holds; None without a limit.

    With a window these are the blocks of the window and of the computed chunk; with recurrent states, the current
    state, the last cached one, and the checkpoints of a prefill.
    """
    if isinstance(manager.kv_cache_spec, MambaSpec):
        return 2 + manager.kv_cache_spec.num_prefill_checkpoint_blocks
    return manager.max_admission_blocks_per_request


def _manager_blocks_beyond(manager: SingleTypeKVCacheManager, num_tokens: int, paths: np.ndarray) -> int:
    """New blocks that rows need after a prefix of `num_tokens`. Encoder outputs need none, as all rows share them."""
    return (
        0 if isinstance(manager, CrossAttentionManager) else trie_fan_out_blocks(num_tokens, paths, manager.block_size)
    )
