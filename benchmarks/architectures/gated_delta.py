"""Gated delta nets in float32, in torch: vLLM's kernel for CPUs takes bfloat16 alone, in which ties hide errors."""

from __future__ import annotations

import torch
import vllm.model_executor.layers.mamba.ops.cpu.gdn_attention as stock
from torch.nn import functional
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

NORM_EPSILON = 1e-6


def float32_attention(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: LayerNameType
) -> None:
    """Stands for `cpu_gdn_attention_core`: reads and writes the states of the step's rows, and the layer's output.

    Args:
        mixed_qkv: [tokens, channels] of all rows, before the convolution.
        b: [tokens, heads], of how much a token writes.
        a: [tokens, heads], of how much it lets fade.
        core_attn_out: [tokens, heads, values], which is written.
        layer_name: As vLLM's graphs pass it.
    """
    context = get_forward_context()
    if context.attn_metadata is None:  # while vLLM looks how much memory a step takes
        return
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    metadata = context.attn_metadata[layer.prefix]
    convolved, states = stock._conv_buffer_view(layer), stock._ssm_state_view(layer)
    starts, slots = metadata.non_spec_query_start_loc.tolist(), metadata.non_spec_state_indices_tensor.tolist()
    for row in range(metadata.num_decodes + metadata.num_prefills):
        tokens, slot = slice(starts[row], starts[row + 1]), slots[row]
        if row >= metadata.num_decodes and not metadata.has_initial_state[row]:
            convolved[slot], states[slot] = 0, 0
        qkv = _convolve(layer, mixed_qkv[tokens], convolved[slot])
        fades = (-layer.A_log.exp() * functional.softplus(a[tokens] + layer.dt_bias)).exp()
        core_attn_out[tokens] = _recur(layer, qkv, fades, b[tokens].sigmoid(), states[slot])


def _convolve(layer: torch.nn.Module, inputs: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """[tokens, channels]: each with the few before it, of which the last are kept in `before` [channels, tokens]."""
    weight = stock._unpacked_conv_weight(layer).float()
    inputs = torch.cat([before, inputs.T], 1)
    before.copy_(inputs[:, 1 - weight.shape[-1] :])
    return functional.silu(functional.conv1d(inputs[None], weight[:, None], groups=len(weight))[0]).T.contiguous()


def _recur(
    layer: torch.nn.Module, qkv: torch.Tensor, fades: torch.Tensor, writes: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """[tokens, heads, values] that are read, one token after the other, from a state [heads, keys, values]."""
    queries, keys, values = (part.squeeze(0) for part in layer.rearrange_mixed_qkv(qkv))
    per_key = values.shape[1] // queries.shape[1]
    queries, keys = (
        functional.normalize(part, dim=-1, eps=NORM_EPSILON).repeat_interleave(per_key, 1) for part in (queries, keys)
    )
    queries = queries * queries.shape[-1] ** -0.5
    read = []
    for token in range(len(values)):
        state *= fades[token][:, None, None]
        held = (state * keys[token][:, :, None]).sum(1)
        state += keys[token][:, :, None] * ((values[token] - held) * writes[token][:, None])[:, None]
        read.append((state * queries[token][:, :, None]).sum(1))
    return torch.stack(read)
