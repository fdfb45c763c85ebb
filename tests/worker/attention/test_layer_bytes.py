"""How large a layer is, is known by what a model holds, whatever its weights are kept as."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers import vocab_parallel_embedding

from vllm_trie.worker.attention.gpu_backend import SharedPrefixAttentionBuilder
from vllm_trie.worker.attention.shared_rows import SharesAttentionPrefixes
from vllm_trie.worker.startup import layer_bytes
from vllm_trie.worker.startup.layer_bytes import measure_layer_bytes


class Embedding(vocab_parallel_embedding.VocabParallelEmbedding):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.zeros(1000, 8))


class Model(nn.Module):
    """Of two layers, one of them of an eighth of the bits, and of a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = Embedding(), Embedding()
        self.head.weight = self.embedding.weight
        quantized = nn.Linear(0, 0, bias=False)
        quantized.weight = nn.Parameter(torch.zeros(8, 16, dtype=torch.int8), requires_grad=False)
        self.layers = nn.ModuleList([nn.Linear(8, 16, bias=False), quantized])


def test_bytes_are_those_of_weights_as_they_are_held() -> None:
    assert measure_layer_bytes(Model(), 2) == (8 * 16 * 4 + 8 * 16) // 2
    assert measure_layer_bytes(nn.Linear(4, 4, bias=False), 0) == 64, "a stage of a pipeline without layers"


@pytest.mark.parametrize(("use_pp", "expected"), [(False, 320), (True, 4096)])
def test_stages_of_a_pipeline_all_use_the_largest(monkeypatch: pytest.MonkeyPatch, use_pp: bool, expected: int) -> None:
    def gather(found: list[int], own: int, group: str) -> None:
        assert group == "stages"
        found[:] = [64, own, 4096]

    monkeypatch.setattr(layer_bytes, "get_pp_group", lambda: SimpleNamespace(world_size=3, cpu_group="stages"))
    monkeypatch.setattr(layer_bytes.dist, "all_gather_object", gather)
    builder = object.__new__(SharedPrefixAttentionBuilder)
    model_config = SimpleNamespace(get_num_layers=lambda _: 2)
    config = SimpleNamespace(model_config=model_config, parallel_config=None)
    groups = [[SimpleNamespace(get_metadata_builder=lambda _: builder)]]
    runner: Any = SimpleNamespace(vllm_config=config, model=Model(), attn_groups=groups, use_pp=use_pp)
    layer_bytes.set_measured_layer_bytes(runner)
    assert builder.layer_bytes == expected


def test_builders_know_nothing_of_them_before() -> None:
    assert SharesAttentionPrefixes.layer_bytes == 0
