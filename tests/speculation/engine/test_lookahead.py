"""Forests are lent as many blocks as their trees can need, however drafts are shared among beams, and no more."""

from __future__ import annotations

from functools import cache

import pytest

from vllm_trie.speculation.engine.lookahead import most_spare_group_blocks


@cache
def most_by_trying(num_drafts: int, width: int, room: int, block_size: int) -> int:
    """The most blocks of all ways to share so many drafts among the rows."""
    if width == 0:
        return 0
    own = [max(-(-(count - room) // block_size), 0) for count in range(num_drafts + 1)]
    return max(own[n] + most_by_trying(num_drafts - n, width - 1, room, block_size) for n in range(num_drafts + 1))


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_so_many_blocks_are_needed_at_most(block_size: int, width: int) -> None:
    for room in range(2 * block_size + 2):
        for num_drafts in range(1, 70):
            expected = most_by_trying(num_drafts, width, room, block_size)
            assert most_spare_group_blocks(num_drafts, width, room, block_size) == expected, (room, num_drafts)
