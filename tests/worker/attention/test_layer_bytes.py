"""How large a layer is, is known by what a model holds, whatever its weights are kept as."""

from __future__ import annotations

import torch
from torch import nn
from vllm.model_executor.layers import vocab_parallel_embedding

from vllm_trie.worker.attention.shared_rows import SharesAttentionPrefixes
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


def test_builders_know_nothing_of_them_before() -> None:
    assert SharesAttentionPrefixes.layer_bytes == 0
