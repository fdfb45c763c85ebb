"""The Triton kernels compute attention as float64 does, whatever rows share: on a GPU, or interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sharing import Batch, Group, any_groups
from tests.worker.attention.trees import TreeBatch, TreeGroup, all_kinds, any_trees, random_tree
from vllm_trie.worker.attention import triton_kernels
from vllm_trie.worker.attention.shared_rows import (
    Scoring,
    SharedAttentionTokens,
    attention_row_by_row,
    attention_token_by_token,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNTOUCHED = 123.0


def check(
    batch: Batch, dtype: torch.dtype = torch.float32, rtol: float = 1e-5, heads_first: bool = True, **scoring: Any
) -> None:
    """Raise AssertionError unless rows of groups are as in float64, and others untouched."""
    attend_and_compare(batch, batch.shared, dtype, rtol, heads_first, **scoring)


def attend_and_compare(
    batch: Batch, shared: SharedAttentionTokens, dtype: torch.dtype, rtol: float, heads_first: bool, **scoring: Any
) -> None:
    """The same of tokens that may be laid out with greater lengths than they have."""
    batch.forget_unused()
    num_kv_heads, head_size = batch.keys.shape[1:]
    by_block = (-1, batch.block_size, num_kv_heads, head_size)
    cache = torch.cat([part.view(by_block) for part in (batch.keys, batch.values)], dim=-1).transpose(1, 2)
    cache = (cache.contiguous() if heads_first else cache).to(DEVICE, dtype)
    outputs = torch.full_like(batch.queries, UNTOUCHED, device=DEVICE, dtype=dtype)
    queries = torch.cat([batch.queries, torch.full_like(batch.queries, torch.nan)], dim=1).to(DEVICE, dtype)
    heads = batch.queries.shape[1], num_kv_heads
    lengths = torch.from_numpy(batch.shared.lengths).to(DEVICE)
    plan = triton_kernels.TritonAttentionPlan(shared, lengths, batch.tables.to(DEVICE), heads)
    on_device = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in scoring.items()
    }
    plan.attend(queries[:, : heads[0]], outputs, cache, Scoring(batch.scale, **on_device))
    found, of_groups = outputs.cpu(), batch.of_groups()
    assert (found[~of_groups] == UNTOUCHED).all()
    expected = batch.reference(**scoring)[of_groups]
    torch.testing.assert_close(found[of_groups].double(), expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 3), (32, 1), (7, 1)], ids=str)
@pytest.mark.parametrize("head_size", [32, 64, 80])
def test_heads_of_any_kind(heads: tuple[int, int], head_size: int) -> None:
    check(Batch([Group(11, 2, [1 + row for row in range(11)], [1] * 11)], *heads, head_size, block_size=16))


@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
@pytest.mark.parametrize("heads_first", [True, False])
def test_blocks_of_any_size_and_layout(block_size: int, heads_first: bool) -> None:
    groups = [Group(3, blocks, [1, 31, 70], [1] * 3) for blocks in (1, 5)]
    check(Batch(groups, 4, 2, 32, block_size, others=2), heads_first=heads_first)


def test_long_prefixes_are_read_in_parts() -> None:
    batch = Batch([Group(2, 40, [1, 5], [1, 5]), Group(3, 1, [4] * 3, [1] * 3)], 2, 1, 32, 32)
    heads = 2, 1
    plan = triton_kernels.TritonAttentionPlan(batch.shared, torch.from_numpy(batch.shared.lengths), batch.tables, heads)
    assert plan._num_parts > 1
    check(batch)


def test_half_precision_is_as_exact_as_its_numbers() -> None:
    batch = Batch([Group(9, 6, [5] * 9, [1] * 9)], 4, 2, 64, 16)
    batch.queries, batch.keys, batch.values = (
        part.half().float() for part in (batch.queries, batch.keys, batch.values)
    )
    check(batch, torch.float16, rtol=3e-3)


@settings(max_examples=2, derandomize=True)
@given(st.data())
def test_any_batch(data: st.DataObject) -> None:
    groups = data.draw(any_groups(3, 10, 60, 4, 12))
    num_kv_heads = data.draw(st.integers(1, 2))
    num_heads = num_kv_heads * data.draw(st.integers(1, 4))
    check(Batch(groups, num_heads, num_kv_heads, 32, 16, data.draw(st.integers(0, 2)), data.draw(st.integers(0, 99))))


@settings(max_examples=2, derandomize=True)
@given(st.data())
def test_any_batch_with_trees(data: st.DataObject) -> None:
    """In a batch with groups whose rows are no trees, and with ordinary rows."""
    trees = data.draw(st.lists(any_trees(3, 40, 70, 6), min_size=1, max_size=2))
    groups = trees + data.draw(any_groups(1, 5, 30, 4, 6)) * data.draw(st.integers(0, 1))
    num_kv_heads = data.draw(st.integers(1, 2))
    num_heads = num_kv_heads * data.draw(st.integers(1, 4))
    others, seed = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 99))
    check(TreeBatch(groups, num_heads, num_kv_heads, 32, 16, others, seed))


@settings(max_examples=2, derandomize=True)
@given(st.data())
def test_windows_caps_and_sinks(data: st.DataObject) -> None:
    """Of trees, and of rows that share blocks; what is before all windows is not read."""
    groups = data.draw(any_groups(2, 6, 40, 4, 12)) + data.draw(st.lists(any_trees(2, 40, 30, 6), max_size=1))
    batch = TreeBatch(groups, 6, 2, 32, 16, others=1, seed=data.draw(st.integers(0, 99)))
    window = data.draw(st.none() | st.integers(1, 40) | st.integers(1, 300))
    batch.forget_what_is_before(window)
    sinks = data.draw(st.sampled_from([None, torch.linspace(-3, 8, 6)]))
    check(batch, window=window, soft_cap=data.draw(st.sampled_from([0.0, 1.5, 50.0])), sinks=sinks)


def test_each_row_can_be_a_group_of_its_own() -> None:
    trees = [random_tree(nodes, nodes) for nodes in (3, 1, 20)]
    group = TreeGroup(3, 1, [30 + len(tree) for tree in trees], [3, 1, 9], trees=trees)
    batch = TreeBatch([group], 4, 2, 32, 16)
    batch.rows = attention_row_by_row(batch.rows)
    assert batch.shared.num_shared.tolist() == [32] * 3
    check(batch)


@pytest.mark.parametrize("window", [None, 1, 3, 9, 60])
@pytest.mark.parametrize("is_shared", [True, False])
def test_the_host_need_not_know_trees_nor_how_long_rows_are(window: int | None, is_shared: bool) -> None:
    trees = [random_tree(nodes, nodes) for nodes in (3, 1, 9, 70)]
    group = TreeGroup(4, 1, [30 + len(tree) for tree in trees], [1] * 4, trees=trees)
    batch = TreeBatch([group], 4, 2, 32, 16)
    batch.forget_masks(DEVICE)
    batch.rows = batch.rows if is_shared else attention_row_by_row(batch.rows)
    longer = batch.shared._replace(lengths=batch.shared.lengths + 7)
    attend_and_compare(batch, longer, torch.float32, 1e-5, heads_first=True, window=window)


@pytest.mark.parametrize(
    ("which", "window"),
    [
        ((1,), 9),
        ((1, 2), None),
        *(pytest.param((1,), window, marks=pytest.mark.nightly) for window in (None, 1, 60)),
        *(pytest.param((1, 2), window, marks=pytest.mark.nightly) for window in (1, 9, 60)),
    ],
)
def test_the_host_need_not_know_in_which_rows_the_tokens_of_trees_lie(which: list[int], window: int | None) -> None:
    batch = all_kinds(16)
    batch.forget_rows(DEVICE, which)
    assert len(batch.shared.unseen) == len(which)
    check(batch, window=window)


@pytest.mark.nightly
def test_nor_need_these_share_anything() -> None:
    batch = all_kinds(16)
    batch.forget_rows(DEVICE, [1, 2])
    batch.rows = batch.rows[1:]
    alone = attention_token_by_token(batch.shared, batch.block_size)
    assert len(alone.num_shared) == len(alone.rows)
    attend_and_compare(batch, alone, torch.float32, 1e-5, heads_first=True)
