"""The CPU's builders of target and draft model take trees, whether or not they read shared blocks once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import CommonAttentionMetadata

from benchmarks.architectures.models import WINDOW
from tests.support.engine import Engine, Engines
from tests.support.pairs import NOISE, drafting
from tests.worker.attention.trees import TreeBatch, TreeGroup, random_tree
from vllm_trie.worker.attention import cpu_backend
from vllm_trie.worker.attention.cpu_backend import SharedPrefixAttentionBuilder, shared_attention_pays

pytestmark = pytest.mark.slow


def described(batch: TreeBatch) -> CommonAttentionMetadata:
    """As vLLM's runner describes a batch."""
    num_rows, num_tokens = len(batch.lengths), len(batch.queries)
    return CommonAttentionMetadata(
        query_start_loc=batch.starts,
        query_start_loc_cpu=batch.starts,
        seq_lens=batch.lengths,
        num_reqs=num_rows,
        num_actual_tokens=num_tokens,
        max_query_len=int(batch.starts.diff().max()),
        max_seq_len=int(batch.lengths.max()),
        block_table_tensor=batch.tables,
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
    )


def builders_of(engine: Engine) -> list[SharedPrefixAttentionBuilder]:
    """Of the target's layers, then of the draft's as the drafter has them."""
    groups = [*engine.runner.attn_groups, *engine.runner.speculator.attn_groups]
    return [group.get_metadata_builder(0) for of_kind in groups for group in of_kind]


@pytest.mark.parametrize(
    ("kind", "option", "dtype"),
    [
        ("gqa", "off", "bfloat16"),
        ("gqa", "on", "float32"),
        ("mistral", "off", "float32"),
        ("mistral", "auto", "bfloat16"),
    ],
)
def test_layers_take_trees_with_every_option(
    engines: Engines, random_pair: Callable[[str, float], tuple[Path, Path]], kind: str, option: str, dtype: str
) -> None:
    target, draft = random_pair(kind, NOISE)
    config: dict[str, Any] = {"additional_config": {"trie_beam": {"shared_prefix_attention": option}}, "dtype": dtype}
    engine = engines(target, **drafting(draft, 3), **config)
    trees = [random_tree(nodes, nodes) for nodes in (3, 1, 9)]
    group = TreeGroup(3, 2, [5 + len(tree) for tree in trees], [3, 1, 9], trees=trees)
    for builder in builders_of(engine):
        assert builder.takes_trees
        assert builder.can_share == (option != "off")
        shape = builder.num_heads, builder.num_kv_heads, builder.head_dim, builder.block_size
        batch = TreeBatch([group], *shape, others=2)
        builder.announce(batch.rows)
        metadata: Any = builder.build(0, described(batch))
        assert metadata.plan.shared.num_shared.tolist() == [64 if builder.can_share else 0]
        for name in builder.layer_names:
            layer = engine.core.vllm_config.compilation_config.static_forward_context[name]
            check_layer(layer, batch, metadata, builder.dtype, WINDOW if kind == "mistral" else None)


def check_layer(layer: Any, batch: TreeBatch, metadata: Any, dtype: torch.dtype, window: int | None) -> None:
    """Raise AssertionError unless a layer attends as in float64."""
    num_kv_heads, head_size = batch.keys.shape[1:]
    for part in (batch.queries, batch.keys, batch.values):
        part.copy_(part.to(dtype))
    cache = torch.zeros(batch.num_blocks, num_kv_heads, batch.block_size, 2 * head_size, dtype=dtype)
    halves = cache.view(batch.num_blocks, num_kv_heads, 2 * batch.block_size, head_size).chunk(2, dim=2)
    keys, values = batch.keys.to(dtype), batch.values.to(dtype)
    ops.cpu_attn_reshape_and_cache(keys, values, *halves, torch.arange(len(keys)), layer.isa)
    queries = batch.queries.to(dtype)
    found = layer.impl.forward(layer, queries, None, None, cache, metadata, torch.zeros_like(queries))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    expected = batch.reference(window).float()
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


def test_sharing_pays_sooner_where_numbers_are_multiplied_by_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for by_two in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda by_two=by_two: by_two)
        assert shared_attention_pays(8, 64, 4, torch.bfloat16) == by_two
        assert not shared_attention_pays(8, 64, 4, torch.float32)
        assert not shared_attention_pays(7, 1024, 4, torch.bfloat16)
    assert np.all([shared_attention_pays(16, 256, heads, torch.float16) for heads in (1, 4, 8)])
    assert set(cpu_backend.PAYS_FROM_BY_TWO) <= set(cpu_backend.PAYS_FROM)
