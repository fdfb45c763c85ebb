"""Lends groups free KV blocks, into which they write drafts in one step."""

from __future__ import annotations

from bisect import bisect_right

from vllm_trie.engine.group import BeamGroup
from vllm_trie.engine.kv_cache import BeamKVCacheManager
from vllm_trie.messages import LookaheadBlocks

LOOKAHEAD_SHARE = 0.75  # the most blocks lent to a group, as a share of those that it holds
FEW_BLOCKS = 16  # may be lent to any group, however few it holds


def lend_lookahead(
    manager: BeamKVCacheManager, group: BeamGroup, num_layers: int, drafts: range, num_kept: int
) -> LookaheadBlocks | None:
    """Lends free blocks to a group, in a step for which `manager` has just made room.

    They are at most `LOOKAHEAD_SHARE` of its own, or `FEW_BLOCKS`; in memory mode, as many as the tail blocks of plain
    beams. They include the next blocks of its rows. For one layer and the fewest drafts it is lent more if need be.

    Args:
        manager: Takes them from its pool.
        group: A group that decodes one token per row.
        num_layers: Tokens by which each row may grow.
        drafts: The range of the number of drafts, from the fewest that are useful.
        num_kept: Free blocks that are not lent.

    Returns:
        As many blocks as there are, up to this; None if they do not suffice for one layer and the fewest drafts.
    """
    tries = manager.tries_of(group.plan.request_id)
    if group.plan.params.memory_mode:
        most_blocks = (group.plan.width - 1) * len(tries)
    else:
        most_blocks = max(int(LOOKAHEAD_SHARE * sum(trie.num_held for trie in tries)), FEW_BLOCKS)
    left = [-trie.num_tokens % trie.block_size for trie in tries]  # tokens that fit into the newest blocks
    num_free, width = manager.block_pool.get_num_free_blocks() - num_kept, group.num_rows
    numbers = sorted({num_layers, *(n for n in left if 0 < n < num_layers)}, reverse=True)
    for most_layers in numbers:
        needs_next = [most_layers > n for n in left]
        num_next = width * sum(needs_next)
        if num_next > most_blocks and most_layers > numbers[-1]:
            continue

        def num_spare(num_drafts: int, needs_next: list[bool] = needs_next) -> list[int]:
            return [
                most_spare_group_blocks(num_drafts, width, n + trie.block_size * needs, trie.block_size)
                for trie, n, needs in zip(tries, left, needs_next, strict=True)
            ]

        least = num_next + sum(num_spare(drafts[0]))
        if least > num_free:
            continue
        means = min(num_free, max(most_blocks, least)) - num_next
        num_drafts = drafts[bisect_right(drafts, means, key=lambda count: sum(num_spare(count))) - 1]
        num_next_blocks = [width if needs else 0 for needs in needs_next]
        lent = manager.lend(group.plan.request_id, num_next_blocks, num_spare(num_drafts))
        return LookaheadBlocks(most_layers, num_drafts, *lent)
    return None


def most_spare_group_blocks(num_drafts: int, width: int, room: int, block_size: int) -> int:
    """The most blocks that the draft trees of `width` rows can need in all, where each row has `room` for drafts.

    A row needs its first further block from `room + 1` drafts on, and each next one per `block_size` drafts. So the
    worst case is one row with all drafts, unless `room` is below a block: then it is as many rows as possible.
    """
    num_rows = min(width if room < block_size else 1, num_drafts // (room + 1))
    return num_rows + (num_drafts - num_rows * (room + 1)) // block_size if num_rows else 0
