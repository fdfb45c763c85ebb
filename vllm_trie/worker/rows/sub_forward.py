"""Some rows of vLLM's forward pass as a pass of their own, for a head or a draft model that computes only these."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup


def sub_forward_of_rows(
    runner: GPUModelRunner,
    smaller: InputBatch,
    tokens: torch.Tensor,
    hidden_states: torch.Tensor,
    aux_hidden_states: list[torch.Tensor],
) -> tuple[Any, Any, torch.Tensor, list[torch.Tensor]]:
    """Metadata and slots by layer, and hidden states, as vLLM passes them to a head's `propose`.

    Args:
        runner: vLLM's.
        smaller, tokens: The results of `sub_batch_of_rows` for these rows.
        hidden_states, aux_hidden_states: [T, H] of the whole batch; the latter of some layers.
    """
    metadata, slots = row_metadata_by_layer(runner, smaller, runner.attn_groups)
    return metadata, slots, hidden_states[tokens], [of_layer[tokens] for of_layer in aux_hidden_states]


def row_metadata_by_layer(
    runner: GPUModelRunner, smaller: InputBatch, attn_groups: list[list[AttentionGroup]]
) -> tuple[Any, Any]:
    """Metadata and slots by layer.

    Args:
        runner: vLLM's.
        smaller: The result of `sub_batch_of_rows` for some rows.
        attn_groups: By KV cache group, those of the layers that compute them.
    """
    tables, slots = GPUModelRunner.prepare_attn(runner, smaller)
    config = runner.kv_cache_config
    metadata = runner.model_state.prepare_attn(smaller, CUDAGraphMode.NONE, tables, slots, attn_groups, config)
    return metadata, build_slot_mappings_by_layer(slots, config)
