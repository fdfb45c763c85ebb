"""Measures the size of a model's layer, from which attention estimates how long the device takes for one."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_trie.worker.announce_shared_rows import builders_of_runner


def set_measured_layer_bytes(runner: GPUModelRunner) -> None:
    """Sets the size of a layer of a runner's model in its attention metadata builders.

    The stages of a pipeline all take the largest of theirs: they must decide alike whether to read shared blocks once,
    as a step may be padded in one case alone, and stages pass on what they compute.
    """
    config = runner.vllm_config
    num_bytes = measure_layer_bytes(runner.model, config.model_config.get_num_layers(config.parallel_config))
    if runner.use_pp:
        of_stages = [0] * get_pp_group().world_size
        dist.all_gather_object(of_stages, num_bytes, group=get_pp_group().cpu_group)
        num_bytes = max(of_stages)
    for _, builder in builders_of_runner(runner):
        builder.layer_bytes = num_bytes


def measure_layer_bytes(model: nn.Module, num_layers: int) -> int:
    """Bytes of the weights of a layer on this device: quantized or not, with all experts.

    With enough rows for shared reads to pay off, nearly all experts are used. Encoders of images or sounds are counted,
    too, so that layers seem a little larger than they are.

    Args:
        model: vLLM's.
        num_layers: Its layers on this device.
    """
    embeddings = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    others = {id(weights) for module in embeddings for weights in module.parameters()}
    return sum(weights.nbytes for weights in model.parameters() if id(weights) not in others) // max(num_layers, 1)
