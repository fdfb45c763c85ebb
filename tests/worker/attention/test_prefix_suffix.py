"""Two calls of FlashAttention, merged, compute attention as float64 does row by row, whatever rows share."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

from tests.support.flash_attention import flash_attn_varlen_func
from tests.support.sharing import Group, any_groups
from tests.worker.attention.trees import TreeBatch
from vllm_trie.worker.attention.prefix_suffix import Calls, Layer, PrefixSuffixAttention
from vllm_trie.worker.attention.shared_rows import Scoring, SharedRows

TOO_MUCH = 3  # by which lengths on the host may exceed those on the device
EIGHT_BITS = torch.float8_e4m3fn


def plan_of(batch: TreeBatch, ahead: int = 0) -> PrefixSuffixAttention:
    described: Any = SimpleNamespace(
        num_actual_tokens=len(batch.queries),
        max_query_len=int(batch.starts.diff().max()),
        query_start_loc=batch.starts,
        query_start_loc_cpu=batch.starts,
        seq_lens=batch.lengths,
        seq_lens_cpu_upper_bound=batch.lengths + ahead,
        block_table_tensor=batch.tables,
    )
    return PrefixSuffixAttention(batch.rows, described, batch.block_size)


def check(
    batch: TreeBatch, ahead: int = 0, no_keys: float = torch.inf, scales: Any = None, **scoring: Any
) -> list[dict[str, Any]]:
    """Raise AssertionError unless all rows are as in float64. Returns what FlashAttention was asked, call by call."""
    batch.forget_unused()
    by_block = (-1, batch.block_size, *batch.keys.shape[1:])
    keys, values = (part.view(by_block) for part in (batch.keys, batch.values))
    padded = torch.cat([batch.queries, torch.full_like(batch.queries[:3], torch.nan)])
    asked = list[dict[str, Any]]()

    def attend(**options: Any) -> Any:
        asked.append(options)
        return flash_attn_varlen_func(**options, no_keys=no_keys)

    outputs = torch.full_like(padded, torch.nan)
    layer = Layer(padded, outputs, keys, values, Scoring(batch.scale, **scoring), scales or {}, 3)
    plan_of(batch, ahead).attend(Calls(attend, merge_attn_states), layer)
    found = outputs[: len(batch.queries)]
    torch.testing.assert_close(found.double(), batch.reference(**scoring), rtol=2e-5, atol=2e-5)
    return asked


@settings(max_examples=40, derandomize=True)
@given(st.data())
def test_any_batch(data: st.DataObject) -> None:
    groups = data.draw(any_groups(3, 6, 60, 4, 6))
    num_kv_heads = data.draw(st.integers(1, 2))
    heads = num_kv_heads * data.draw(st.integers(1, 4)), num_kv_heads
    batch = TreeBatch(groups, *heads, 16, 16, data.draw(st.integers(0, 3)), data.draw(st.integers(0, 99)))
    soft_cap, no_keys = (
        data.draw(st.sampled_from([0.0, 1.5, 50.0])),
        data.draw(st.sampled_from([torch.inf, -torch.inf])),
    )
    sinks = data.draw(st.sampled_from([None, torch.linspace(-3, 8, heads[0])]))
    check(batch, data.draw(st.integers(0, TOO_MUCH)), no_keys, soft_cap=soft_cap, sinks=sinks)


def test_rows_side_by_side_are_one_row_of_the_first_call_and_others_have_no_keys_there() -> None:
    batch = TreeBatch([Group(4, 3, [5, 6, 7, 40], [1] * 4)], 4, 2, 16, 16, others=2)
    order = [*batch.rows[0].places, *sorted({*range(6)} - {*batch.rows[0].places})]
    counts = batch.starts.diff()[order]
    batch.queries = torch.cat([batch.queries[batch.starts[row] : batch.starts[row + 1]] for row in order])
    batch.tables, batch.lengths = batch.tables[order], batch.lengths[order]
    batch.starts = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    batch.rows = [SharedRows(np.arange(4), 48)]
    prefix, suffix = check(batch)
    assert prefix["seqused_k"].tolist() == [48, 0]
    assert prefix["cu_seqlens_q"].tolist() == [0, 4, len(batch.queries)]
    assert prefix["block_table"].shape == (2, 3)
    assert not prefix["causal"]
    assert suffix["seqused_k"].tolist() == [5, 6, 7, 40, *batch.lengths[4:].tolist()]
    assert suffix["causal"]


def test_each_token_sees_a_key_of_its_own() -> None:
    """What a row computes may begin within what it shares: then less of that is read once."""
    batch = TreeBatch([Group(3, 3, [1, 2, 3], [1, 2, 3])], 2, 1, 16, 16)
    batch.rows[0] = batch.rows[0]._replace(num_shared=int(batch.lengths.min()) // 16 * 16)
    batch.starts = torch.cat([torch.zeros(1), (batch.starts.diff() + 16).cumsum(0)]).int()
    batch.queries = torch.randn(int(batch.starts[-1]), 2, 16)
    prefix, _ = check(batch, sinks=torch.tensor([2.0, -1.0]))
    assert prefix["seqused_k"].max() == 32


def test_numbers_of_8_bits_are_scaled_in_both_calls() -> None:
    batch = TreeBatch([Group(5, 2, [9] * 5, [1] * 5)], 4, 2, 16, 16, others=1)
    scales = {"q_descale": torch.tensor([2.0]), "k_descale": torch.tensor([0.5]), "v_descale": torch.tensor([3.0])}
    batch.values = batch.values.to(EIGHT_BITS).float()
    plain = batch.values.clone()
    batch.values = plain * 3
    expected = batch.reference()
    batch.values = plain
    batch.reference = lambda **_: expected  # type: ignore[method-assign]
    check(batch, scales=scales)


@pytest.mark.parametrize(("window", "computes"), [(None, True), (62, True), (61, False), (5, False)])
def test_windows_that_hide_something_are_left_to_vllm(window: int | None, computes: bool) -> None:
    batch = TreeBatch([Group(2, 3, [5, 14], [1, 1])], 2, 1, 16, 16)
    assert plan_of(batch).computes(window) == computes


@pytest.mark.parametrize("broken", ["seqused_k", "block_table", "cu_seqlens_q"])
def test_the_comparison_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    batch = TreeBatch([Group(3, 3, [5, 6, 20], [1, 2, 1])], 2, 1, 16, 16, others=1)
    stock = flash_attn_varlen_func

    def wrong(**options: Any) -> Any:
        changed = options[broken].clone()
        changed[1] = changed[0] if broken != "seqused_k" else max(int(changed[1]) - 1, 0)
        return stock(**(options | {broken: changed}))

    monkeypatch.setitem(globals(), "flash_attn_varlen_func", partial(wrong))
    with pytest.raises(AssertionError):
        check(batch)
