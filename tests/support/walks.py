"""Random walks over the operations of a trie, which hypothesis drives and, where one fails, shortens."""

from __future__ import annotations

import os

from hypothesis import strategies as st

OPERATIONS = int(os.environ.get("TRIE_OPERATIONS", 3_000)) // 2  # for each of the two tries
MOST_PER_WALK = 200
MEAN_PER_WALK = MOST_PER_WALK * 2 // 5  # on the safe side of a half
NUM_WALKS = 50 + OPERATIONS // MEAN_PER_WALK


def walks() -> st.SearchStrategy[list[int]]:
    """A seed per operation, for all that it chooses, so that leaving one out leaves the others what they are."""
    lengths = st.integers(1, MOST_PER_WALK)
    return lengths.flatmap(lambda n: st.lists(st.integers(0, 1 << 16), min_size=n, max_size=n))
