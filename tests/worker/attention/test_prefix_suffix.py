"""Two calls of FlashAttention, merged, compute attention as float64 does row by row, whatever rows share."""

from __future__ import annotations

from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

from benchmarks.launch_counter import LaunchCounter
from tests.support.flash_attention import flash_attn_varlen_func
from tests.support.recorded_graphs import Graph, Recorder, as_kernel
from tests.support.sharing import Batch, Group, any_groups
from tests.worker.attention.trees import TreeBatch
from vllm_trie.worker.attention.prefix_suffix import Calls, Layer, PrefixSuffixAttention, PrefixSuffixGraphs
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


HEADS, ROWS, WIDTH, SEQUENCES = (4, 2, 16), 12, 12, 14  # of graphs: rows, blocks of each, sequences of the first call
SEVERAL_LAYERS = 2


class CapturedAttention:
    """Attention in two layers of a graph of steps with `ROWS` rows, which reads what was there when it was captured."""

    def __init__(self, num_blocks: int) -> None:
        num_heads, num_kv_heads, head_size = HEADS
        self.starts = torch.arange(ROWS + 1, dtype=torch.int32)
        self.lengths, self.tables = torch.ones(ROWS, dtype=torch.int32), torch.zeros(ROWS, WIDTH, dtype=torch.int32)
        self.queries, self.outputs = torch.zeros(2, SEVERAL_LAYERS, ROWS, num_heads, head_size)
        self.keys, self.values = torch.zeros(2, num_blocks, 16, num_kv_heads, head_size)
        self.asked = list[dict[str, Any]]()
        self.graphs = PrefixSuffixGraphs([ROWS], SEQUENCES, self.schedule, torch.device("cpu"))
        self.attend_in_layers(self.plan([], self.starts, self.lengths))  # as vLLM warms up
        plan, self.graph = self.plan([], self.starts, self.lengths), Graph()
        with Recorder(self.graph).capturing():
            self.attend_in_layers(plan)

    def schedule(self, sequences: Any, causal: bool) -> dict[str, Any]:
        return {"scheduler_metadata": sequences.lengths + causal, "num_splits": 7}

    def plan(self, groups: Any, starts: torch.Tensor, bounds: torch.Tensor) -> PrefixSuffixAttention:
        described: Any = SimpleNamespace(
            num_actual_tokens=ROWS,
            max_query_len=1,
            query_start_loc=self.starts,
            query_start_loc_cpu=starts,
            seq_lens=self.lengths,
            seq_lens_cpu_upper_bound=bounds,
            block_table_tensor=self.tables,
        )
        return PrefixSuffixAttention(groups, described, 16, graphs=self.graphs)

    def attend_in_layers(self, plan: PrefixSuffixAttention) -> None:
        def attend(**options: Any) -> Any:
            self.asked.append(options)
            assert torch.equal(options["scheduler_metadata"], options["seqused_k"] + options["causal"])
            assert options["num_splits"] == 7
            return flash_attn_varlen_func(**options)

        for queries, outputs in zip(self.queries, self.outputs, strict=True):
            layer = Layer(queries, outputs, self.keys, self.values, Scoring(HEADS[2] ** -0.5), {}, 3)
            plan.attend(Calls(as_kernel(attend), as_kernel(merge_attn_states)), layer)

    def replay(self, batch: Batch, ahead: int = 0) -> torch.Tensor:
        """The outputs of a batch of fewer rows, by what the graph reads of it."""
        num_rows, nothing = len(batch.lengths), slice(len(batch.lengths), None)
        for tensor in (self.lengths, self.tables):
            tensor[nothing] = 0
        self.tables.fill_(0)[:num_rows, : batch.tables.shape[1]] = batch.tables
        self.starts[: num_rows + 1], self.starts[num_rows + 1 :] = batch.starts, num_rows
        self.lengths[:num_rows] = batch.lengths
        for layer, queries in enumerate(self.queries):
            queries[:num_rows] = batch.queries * (layer + 1)
        for part, own in ((self.keys, batch.keys), (self.values, batch.values)):
            part.fill_(torch.nan)[: batch.num_blocks] = own.view(-1, *part.shape[1:])
        bounds = torch.zeros_like(self.lengths)
        bounds[:num_rows] = batch.lengths + ahead
        self.plan(batch.rows, self.starts.clone(), bounds)
        self.outputs.fill_(torch.nan)
        self.asked.clear()
        self.graph.replay()
        return self.outputs[:, :num_rows]


@cache
def captured() -> CapturedAttention:
    return CapturedAttention(num_blocks=300)


@settings(max_examples=25, derandomize=True)
@given(st.data())
def test_a_graph_finds_for_any_batch_what_is_found_without(data: st.DataObject) -> None:
    """Of groups, of other rows in any order, and of fewer rows than it has."""
    groups = data.draw(any_groups(3, 3, 60, 1, 6))
    batch = Batch(groups, *HEADS, 16, data.draw(st.integers(0, 3)), data.draw(st.integers(0, 99)))
    batch.starts = torch.arange(len(batch.lengths) + 1, dtype=torch.int32)
    batch.queries = batch.queries[: len(batch.lengths)]
    batch.forget_unused()
    ahead = data.draw(st.integers(0, TOO_MUCH))
    found = captured().replay(batch, ahead)
    without = torch.empty_like(batch.queries)
    by_block = (-1, 16, *batch.keys.shape[1:])
    keys, values = (part.view(by_block) for part in (batch.keys, batch.values))
    layer = Layer(batch.queries, without, keys, values, Scoring(batch.scale), {}, 3)
    plan_of(batch, ahead).attend(Calls(flash_attn_varlen_func, merge_attn_states), layer)
    torch.testing.assert_close(found[0], without, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(found[0].double(), batch.reference(), rtol=2e-5, atol=2e-5)
    batch.queries = batch.queries * SEVERAL_LAYERS
    torch.testing.assert_close(found[-1].double(), batch.reference(), rtol=2e-5, atol=2e-5)


def side_by_side(*groups: Group, others: int = 0) -> Batch:
    """Rows of one token, those of a group next to each other, and then ordinary ones."""
    batch = Batch(groups, *HEADS, 16, others)
    order = np.concatenate([rows.places for rows in batch.rows])
    order = np.append(order, np.setdiff1d(np.arange(len(batch.lengths)), order))
    batch.tables, batch.lengths = batch.tables[order], batch.lengths[order]
    firsts = np.cumsum([0, *(group.num_rows for group in groups)])
    batch.rows = [
        rows._replace(places=np.arange(first, end))
        for rows, first, end in zip(batch.rows, firsts[:-1], firsts[1:], strict=True)
    ]
    batch.queries = torch.randn(len(order), *HEADS[::2])
    batch.starts = torch.arange(len(order) + 1, dtype=torch.int32)
    return batch


def test_a_graph_reads_shared_blocks_once_and_sequences_that_are_left_over_have_no_queries() -> None:
    batch = side_by_side(Group(4, 3, [5, 6, 7, 9], [1] * 4), Group(3, 1, [2, 2, 2], [1] * 3), others=2)
    captured().replay(batch)
    prefix, suffix, *_ = captured().asked
    assert len(captured().asked) == 2 * SEVERAL_LAYERS
    assert prefix["seqused_k"].tolist() == [48, 16, *[0] * (SEQUENCES - 2)]
    assert prefix["cu_seqlens_q"].tolist() == [0, 4, 7, *[9] * (SEQUENCES - 2)]
    assert (prefix["max_seqlen_q"], prefix["max_seqlen_k"]) == (ROWS, WIDTH * 16)
    assert suffix["seqused_k"].tolist() == [5, 6, 7, 9, 2, 2, 2, *batch.lengths[7:].tolist(), 0, 0, 0]
    assert suffix["max_seqlen_k"] == WIDTH * 16


def test_more_sequences_than_a_graph_has_are_refused() -> None:
    """And no step within the bounds that it names has as many."""
    assert captured().graphs.most_groups == (SEQUENCES - 1) // 2 == 6
    assert captured().graphs.hold(ROWS, 6)
    assert not captured().graphs.hold(ROWS, 7)
    assert not captured().graphs.hold(ROWS + 1, 1)
    few = PrefixSuffixGraphs([ROWS], 2, captured().schedule, torch.device("cpu"))
    batch = side_by_side(Group(2, 1, [1, 1], [1, 1]), Group(2, 1, [1, 1], [1, 1]), others=1)
    with pytest.raises(ValueError, match="3 sequences of rows, but CUDA graphs have 2"):
        PrefixSuffixAttention(batch.rows, described(batch), 16, graphs=few)


def described(batch: Batch, device: str = "cpu") -> Any:
    return SimpleNamespace(
        num_actual_tokens=len(batch.lengths),
        max_query_len=1,
        query_start_loc=batch.starts.to(device),
        query_start_loc_cpu=batch.starts,
        seq_lens=batch.lengths.to(device),
        seq_lens_cpu_upper_bound=batch.lengths,
        block_table_tensor=batch.tables.to(device),
    )


def test_all_that_a_graph_needs_of_a_step_is_one_upload() -> None:
    """Nothing is launched, and nobody waits."""
    batch, nowhere = side_by_side(Group(8, 3, [5] * 8, [1] * 8), others=4), torch.device("meta")
    graphs, of_step = PrefixSuffixGraphs([ROWS], SEQUENCES, captured().schedule, nowhere), described(batch, "meta")
    PrefixSuffixAttention([], of_step, 16, graphs=graphs)  # as it is captured
    with LaunchCounter() as counter:
        PrefixSuffixAttention(batch.rows, of_step, 16, graphs=graphs)
    assert (counter.operations, counter.copies, counter.waits) == ([], 1, 0)


def test_in_a_graph_layers_with_windows_are_left_to_vllm_whatever_a_step_has() -> None:
    plan = captured().plan([], captured().starts, captured().lengths)
    assert [plan.computes(window) for window in (None, WIDTH * 16, WIDTH * 16 - 1)] == [True, True, False]


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
        return stock(**(options | {broken: changed, "max_seqlen_q": len(options["q"])}))

    monkeypatch.setitem(globals(), "flash_attn_varlen_func", partial(wrong))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check(batch)
