"""How large a layer of a model is: by that, attention tells how long the device takes for one."""

from __future__ import annotations

from itertools import chain

from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_trie.worker.attention.shared_rows import SharesAttentionPrefixes


def tell_measured_layer_bytes(runner: GPUModelRunner) -> None:
    """Tell builders of attention metadata how large a layer of a runner's model is."""
    config = runner.vllm_config
    num_bytes = measure_layer_bytes(runner.model, config.model_config.get_num_layers(config.parallel_config))
    for group in chain(*runner.attn_groups):
        builder: object = group.get_metadata_builder(0)
        if isinstance(builder, SharesAttentionPrefixes):
            builder.layer_bytes = num_bytes


def measure_layer_bytes(model: nn.Module, num_layers: int) -> int:
    """Bytes of the weights of a layer, as they are held on this device: quantized or not, with all experts.

    Rows so many that it pays to read their shared blocks once ask nearly all experts. What encodes images or sounds is
    counted, too, so that layers beside it seem a little larger than they are.

    Args:
        model: vLLM's.
        num_layers: That it has on this device.
    """
    embeddings = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    others = {id(weights) for module in embeddings for weights in module.parameters()}
    return sum(weights.nbytes for weights in model.parameters() if id(weights) not in others) // max(num_layers, 1)
