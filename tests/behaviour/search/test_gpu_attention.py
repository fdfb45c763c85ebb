"""The GPU's backend lets FlashAttention read shared blocks once; kernels of ours compute trees, and what it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata

from tests.support.engine import Engine, Engines
from tests.support.flash_attention import flash_attn_varlen_func
from tests.support.sharing import Batch, Group
from tests.worker.attention.trees import TreeBatch, TreeGroup, random_tree
from vllm_trie.worker.attention import gpu_backend
from vllm_trie.worker.attention.check_attention import check_demanded_attention_layers
from vllm_trie.worker.attention.gpu_backend import SharedPrefixAttentionBuilder, SharedPrefixAttentionImpl
from vllm_trie.worker.startup.layer_bytes import set_measured_layer_bytes

pytestmark = pytest.mark.slow

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 32, 32  # of the model "gqa"
DEMANDED = {"trie_beam": {"check_invariants": True, "shared_prefix_attention": "on"}}


@pytest.fixture
def engine(engines: Engines, random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Its layers are those of the GPU's backend for a while."""
    engine = engines(random_model("gqa"), additional_config=DEMANDED)
    config, scale = engine.core.vllm_config, HEAD_SIZE**-0.5
    with set_current_vllm_config(config):
        impl = SharedPrefixAttentionImpl(NUM_HEADS, HEAD_SIZE, scale, NUM_KV_HEADS, None, None, "auto")
    for layer in config.compilation_config.static_forward_context.values():
        monkeypatch.setattr(layer, "impl", impl)
    return engine


def builder_of(engine: Engine) -> SharedPrefixAttentionBuilder:
    ((group,),) = engine.runner.attn_groups
    with set_current_vllm_config(engine.core.vllm_config):
        return SharedPrefixAttentionBuilder(
            group.kv_cache_spec, group.layer_names, engine.core.vllm_config, torch.device("cpu")
        )


def described(batch: Batch) -> CommonAttentionMetadata:
    """As vLLM's runner describes a batch, whose lengths on the host may be too great."""
    num_rows, num_tokens = len(batch.lengths), len(batch.queries)
    return CommonAttentionMetadata(
        query_start_loc=batch.starts,
        query_start_loc_cpu=batch.starts,
        seq_lens=batch.lengths,
        seq_lens_cpu_upper_bound=batch.lengths + 3,
        num_reqs=num_rows,
        num_actual_tokens=num_tokens,
        max_query_len=int(batch.starts.diff().max()),
        max_seq_len=int(batch.lengths.max()),
        block_table_tensor=batch.tables,
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.zeros(num_tokens, dtype=torch.int64),
        is_prefilling=torch.zeros(num_rows, dtype=torch.bool),
    )


def batch_of(num_others: int) -> Batch:
    groups = [Group(5, 3, [1, 2, 3, 33, 40], [1, 2, 3, 1, 1]), Group(2, 2, [7, 9], [1, 1])]
    return Batch(groups, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, num_others)


def cache_of(batch: Batch) -> torch.Tensor:
    """As vLLM lays it out."""
    by_block = (-1, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    return torch.cat([part.view(by_block) for part in (batch.keys, batch.values)], dim=-1).transpose(1, 2)


def layer_of(engine: Engine) -> Any:
    return next(iter(engine.core.vllm_config.compilation_config.static_forward_context.values()))


@pytest.mark.parametrize("num_others", [0, 3])
def test_flash_attention_computes_all_rows_in_two_calls(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, num_others: int
) -> None:
    batch, calls, builder, layer = batch_of(num_others), [], builder_of(engine), layer_of(engine)

    def attend(**options: Any) -> Any:
        calls.append(options)
        return flash_attn_varlen_func(**options)

    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", attend, raising=False)
    builder.announce(batch.rows)
    metadata = builder.build(0, described(batch))
    assert not builder.groups
    outputs = torch.zeros_like(batch.queries)
    found = layer.impl.forward(layer, batch.queries, None, None, cache_of(batch), metadata, outputs)
    assert found is outputs
    torch.testing.assert_close(found, batch.reference().float(), rtol=1e-5, atol=1e-5)
    assert [call["causal"] is True for call in calls] == [False, True]


def test_layers_with_windows_compute_the_whole_batch_as_ever(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, builder, layer, asked = batch_of(2), builder_of(engine), layer_of(engine), list[FlashAttentionMetadata]()
    builder.announce(batch.rows)
    metadata = builder.build(0, described(batch))
    monkeypatch.setattr(layer.impl, "sliding_window", (7, 0))

    def flash_attention(self: Any, layer: Any, query: Any, k: Any, v: Any, cache: Any, of: Any, output: Any) -> Any:
        asked.append(of)
        return output

    monkeypatch.setattr(FlashAttentionImpl, "forward", flash_attention)
    layer.impl.forward(layer, batch.queries, None, None, cache_of(batch), metadata, torch.zeros_like(batch.queries))
    (of_all,) = asked
    assert torch.equal(of_all.seq_lens, batch.lengths)
    assert torch.equal(of_all.block_table, batch.tables)
    assert torch.equal(of_all.query_start_loc, batch.starts)
    del builder.splits
    assert not builder.splits


@pytest.mark.parametrize("num_others", [0, 3])
def test_else_groups_and_others_are_computed_apart(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, num_others: int
) -> None:
    batch = batch_of(num_others)
    expected, of_groups = batch.reference().float(), batch.of_groups()
    builder, asked = builder_of(engine), list[FlashAttentionMetadata]()
    builder.splits = False
    builder.announce(batch.rows)
    metadata = builder.build(0, described(batch))
    assert not builder.groups

    def flash_attention(self: Any, layer: Any, query: Any, k: Any, v: Any, cache: Any, of: Any, output: Any) -> Any:
        asked.append(of)
        assert torch.equal(query, batch.queries[~of_groups])
        output.copy_(expected[~of_groups])
        return output

    monkeypatch.setattr(FlashAttentionImpl, "forward", flash_attention)
    layer = layer_of(engine)
    outputs = torch.zeros_like(batch.queries)
    found = layer.impl.forward(layer, batch.queries, None, None, cache_of(batch), metadata, outputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(asked) == (num_others > 0)
    assert metadata.num_actual_tokens == len(batch.queries)
    for of_others in asked:
        rows = [row for row in range(len(batch.lengths)) if not any(row in group.places for group in batch.rows)]
        assert torch.equal(of_others.seq_lens, batch.lengths[rows])
        assert torch.equal(of_others.block_table, batch.tables[rows])
        assert of_others.query_start_loc.diff().tolist() == batch.starts.diff()[rows].tolist()
        assert of_others.num_actual_tokens == int((~of_groups).sum())


@pytest.mark.parametrize("shares", [True, False])
def test_trees_are_computed_whether_or_not_shared_blocks_are_read_once(engine: Engine, shares: bool) -> None:
    trees = [random_tree(nodes, nodes) for nodes in (3, 1, 9)]
    group = TreeGroup(3, 2, [5 + len(tree) for tree in trees], [3, 1, 9], trees=trees)
    batch = TreeBatch([group], NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE)
    builder = builder_of(engine)
    assert builder.takes_trees
    builder.can_share = shares
    builder.announce(batch.rows)
    metadata = builder.build(0, described(batch))
    assert metadata.plan.shared.num_shared.tolist() == ([64] if shares else [64] * 3)
    layer = layer_of(engine)
    outputs = torch.zeros_like(batch.queries)
    found = layer.impl.forward(layer, batch.queries, None, None, cache_of(batch), metadata, outputs)
    torch.testing.assert_close(found, batch.reference().float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_nodes", "shares"), [(31, True), (32, False)])
def test_trees_that_fill_a_tile_share_nothing(engine: Engine, num_nodes: int, shares: bool) -> None:
    """A tile takes 64 queries, 2 of each node; a smaller tree beside it is a group of its own."""
    tree = random_tree(num_nodes, 1)
    large = TreeGroup(2, 2, [5 + num_nodes, 5 + 1], [num_nodes, 1], trees=[tree, random_tree(1, 1)])
    small = TreeGroup(2, 2, [5 + 3] * 2, [3] * 2, trees=[random_tree(3, seed) for seed in (1, 2)])
    batch = TreeBatch([large, small], NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE)
    builder = builder_of(engine)
    builder.option = "auto"
    builder.announce(batch.rows)
    assert (builder.build(0, described(batch)).plan.shared.num_shared > 0).tolist() == [True] * (2 if shares else 3)
    builder.option = "on"
    builder.announce(batch.rows)
    assert len(builder.build(0, described(batch)).plan.shared.num_shared) == 2


def test_a_step_without_shared_blocks_is_vllms_own(engine: Engine) -> None:
    batch = Batch([Group(3, 2, [1, 2, 3], [1, 1, 1])], NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE)
    assert type(builder_of(engine).build(0, described(batch))) is FlashAttentionMetadata


def attn_group_of(builder: SharedPrefixAttentionBuilder) -> Any:
    return SimpleNamespace(get_metadata_builder=lambda _: builder)


def test_full_graphs_of_all_steps_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.core.vllm_config.compilation_config, "cudagraph_mode", CUDAGraphMode.FULL)
    with pytest.raises(ValueError, match="cudagraph_mode=FULL exclude each other"):
        check_demanded_attention_layers(engine.core.vllm_config, [attn_group_of(builder_of(engine))])


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_graphs_are_those_that_vllm_chooses_when_it_has_all_builders(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    config = engine.core.vllm_config.compilation_config
    monkeypatch.setattr(config, "cudagraph_mode", CUDAGraphMode.FULL)
    builder = builder_of(engine)
    monkeypatch.setattr(config, "cudagraph_mode", CUDAGraphMode[mode])
    check_demanded_attention_layers(engine.core.vllm_config, [attn_group_of(builder)])
    assert (builder.can_share, builder.takes_trees) == (True, True)
    assert builder.takes([(2, 32)], 2) == [True]


def test_by_itself_it_reads_shared_blocks_once_where_that_pays(engine: Engine) -> None:
    """Summed over the groups of a step; with "on" wherever any are shared."""
    builder = builder_of(engine)
    ((group,),) = engine.runner.attn_groups
    set_measured_layer_bytes(engine.runner)
    builder.layer_bytes = group.get_metadata_builder(0).layer_bytes
    assert builder.layer_bytes > 0
    assert builder.takes([(2, 32), (2, 0)], 4) == [True, False]
    builder.option = "auto"
    assert builder.takes([(200, 4096), (2, 32)], 202) == [False, False]  # of layers as small as these
    assert builder.takes([(2000, 4096)], 2000) == [True]
    builder.layer_bytes = gpu_backend.HOST_US * gpu_backend.WEIGHTS_PER_US
    assert builder.takes([(300, 4096)], 300) == [True]
    per_token = 2 * NUM_KV_HEADS * HEAD_SIZE * 4
    enough = gpu_backend.LEAST_READ_AGAIN // per_token // 32
    assert builder.takes([(33, enough - 32)], 33) == [False]
    assert builder.takes([(33, enough), (4, 0)], 37) == [True, False]
    assert builder.takes([(17, enough)] * 2, 34) == [True, True]
    builder._host_us = gpu_backend.HOST_US_WITHOUT_GRAPHS
    assert builder.takes([(33, enough)], 33) == [False]
    builder._host_us = gpu_backend.HOST_US
    builder.splits = False
    assert builder.takes([(33, enough)], 33) == [False]


@pytest.mark.parametrize(("mode", "host_us"), [("FULL_DECODE_ONLY", 1000), ("FULL_AND_PIECEWISE", 300), ("NONE", 300)])
def test_where_graphs_of_parts_are_missing_the_host_launches_whole_layers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, mode: str, host_us: int
) -> None:
    monkeypatch.setattr(engine.core.vllm_config.compilation_config, "cudagraph_mode", CUDAGraphMode[mode])
    assert builder_of(engine)._host_us == host_us


def test_the_less_the_host_waits_for_the_device_the_more_must_be_shared() -> None:
    """Rows of Qwen3's 8B and 0.6B, with 4 KiB of keys and values of each token and layer."""
    large, small = (12 * hidden**2 * 2 for hidden in (4096, 1024))
    for layer_bytes, rows_to_share, rows_not_to in ((large, 320, 256), (small, 512, 384)):
        assert gpu_backend.shared_attention_pays(rows_to_share * 1024 * 4096, layer_bytes)
        assert not gpu_backend.shared_attention_pays(rows_not_to * 1024 * 4096, layer_bytes)
