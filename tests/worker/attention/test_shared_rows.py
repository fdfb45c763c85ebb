"""What the rows of groups compute is laid out so that a kernel reads it."""

from __future__ import annotations

import numpy as np

from vllm_trie.worker.attention.shared_rows import RowTrees, SharedRows, first_attention_keys, shared_attention_tokens


def test_tokens_of_groups_come_one_group_after_the_other_and_each_sees_what_came_before() -> None:
    starts, lengths = np.array([0, 1, 4, 5, 7]), np.array([70, 73, 200, 66])
    groups = [SharedRows(np.array([3, 0]), 64), SharedRows(np.array([1]), 32)]
    shared = shared_attention_tokens(groups, starts, lengths, block_size=32)
    assert shared.places.tolist() == [5, 6, 0, 1, 2, 3]
    assert shared.rows.tolist() == [3, 3, 0, 1, 1, 1]
    assert shared.lengths.tolist() == [65, 66, 70, 71, 72, 73]
    assert shared.starts.tolist() == [0, 3, 6]
    assert shared.num_shared.tolist() == [64, 32]
    assert shared.tree_starts.tolist() == shared.lengths.tolist()
    assert not shared.trees.any()
    assert {array.dtype for array in shared[:-2]} == {np.dtype(np.int32)}


def test_rows_that_compute_one_token_each_are_laid_out_alike() -> None:
    starts, lengths = np.arange(5), np.array([70, 73, 200, 66])
    groups = [SharedRows(np.array([3, 0]), 64), SharedRows(np.array([1]), 96)]
    for sees_all in (False, True):
        shared = shared_attention_tokens(groups, starts, lengths, block_size=32, sees_all=sees_all)
        assert shared.places.tolist() == shared.rows.tolist() == [3, 0, 1]
        assert shared.lengths.tolist() == shared.tree_starts.tolist() == [66, 70, 73]
        assert shared.starts.tolist() == [0, 2, 3]
        assert shared.num_shared.tolist() == [64, 64]
        assert {array.dtype for array in shared[:-2]} == {np.dtype(np.int32)}


def test_no_token_sees_shared_blocks_that_come_after_it() -> None:
    """Rows that compute their histories anew know of blocks that they have yet to fill."""
    shared = shared_attention_tokens(
        [SharedRows(np.array([0, 1]), 96)], np.array([0, 40, 80]), np.array([100, 100]), block_size=32
    )
    assert shared.lengths.min() == 61
    assert shared.num_shared.tolist() == [32]


def test_what_tokens_see_of_trees_is_packed_into_words_and_no_part_of_a_tree_is_shared() -> None:
    fork, chain = np.array([[1, 1, 0], [1, 0, 1]], bool), np.tri(66, dtype=bool)[-1:]
    groups = [SharedRows(np.array([2]), 32), SharedRows(np.array([0, 1]), 96, RowTrees(70, [fork, chain]))]
    shared = shared_attention_tokens(groups, np.array([0, 2, 3, 4]), np.array([73, 136, 40]), block_size=32)
    assert shared.lengths.tolist() == [40, 72, 73, 136]
    assert shared.tree_starts.tolist() == [40, 70, 70, 70]
    assert shared.trees.tolist() == [[0, 0], [0b011, 0], [0b101, 0], [-1, 0b11]]
    assert shared.num_shared.tolist() == [32, 64]


def test_windows_are_counted_in_positions_not_in_places_of_the_cache() -> None:
    """A root, its child, and below the child two chains, node by node in turn."""
    sees = np.array([[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0]], bool)
    sees = np.vstack([sees, [[1, 1, 1, 0, 1, 0], [1, 1, 0, 1, 0, 1]]]).astype(bool)
    groups = [SharedRows(np.array([0]), 0, RowTrees(40, [sees])), SharedRows(np.array([1]), 0)]
    shared = shared_attention_tokens(groups, np.array([0, 6, 8]), np.array([46, 50]), block_size=32)
    assert first_attention_keys(shared, None).tolist() == [0] * 8
    assert first_attention_keys(shared, 3).tolist() == [38, 39, 40, 40, 41, 41, 46, 47]
    assert first_attention_keys(shared, 2).tolist() == [39, 40, 41, 41, 42, 43, 47, 48]
    assert first_attention_keys(shared, 45).tolist() == [0, 0, 0, 0, 0, 0, 4, 5]
