"""The number formats that are tried: a tiny Llama in 16 bits, with KV caches of 8, with weights of 8 and of 4."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.architectures.models import Architecture

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 32  # weights of an output that share a scale
BITS = 4
PER_INT32 = 32 // BITS
IN_ORDER = range(PER_INT32)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight neighbours comes next, from the low bits on

HALF = {"dtype": "float16"}
BRAIN = {"dtype": "bfloat16"}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**INT8, "strategy": "token", "dynamic": True},
        }
    },
}
GPTQ = {"quant_method": "gptq", "bits": BITS, "group_size": GROUP, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": BITS, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def _quantised(config: dict[str, Any], pack: Callable[[Tensor], dict[str, Tensor]]) -> Callable[[Path], None]:
    """What replaces each linear layer's weight (outputs, inputs) of a saved model by the tensors that `pack` makes."""

    def quantise(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights, saved = folder / "model.safetensors", folder / "config.json"
        tensors = {}
        for name, weight in load_file(weights).items():
            layer, is_linear = name.removesuffix("weight"), name.endswith("_proj.weight")
            tensors |= {layer + part: tensor for part, tensor in pack(weight).items()} if is_linear else {name: weight}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights, {"format": "pt"})
        saved.write_text(json.dumps(json.loads(saved.read_text()) | {"quantization_config": config}))

    return quantise


def _int8(weight: Tensor) -> dict[str, Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scales).round().char(), "weight_scale": scales}


def _gptq(weight: Tensor) -> dict[str, Tensor]:
    """With the middle of the range as zero; what is stored is one less."""
    import torch

    grouped = _grouped(weight)
    scales = grouped.abs().amax(1) / 8
    zeros = torch.full_like(scales, 8)
    packed = _pack(_four_bits(grouped, scales, zeros).T, IN_ORDER).T
    return {"qweight": packed, "qzeros": _pack(zeros - 1, IN_ORDER), "scales": scales}


def _awq(weight: Tensor) -> dict[str, Tensor]:
    """With a zero for each group, so that the range is used up."""
    grouped = _grouped(weight)
    scales = (grouped.amax(1) - grouped.amin(1)) / 15
    zeros = (-grouped.amin(1) / scales).round()
    packed = _pack(_four_bits(grouped, scales, zeros), AWQ_ORDER)
    return {"qweight": packed, "qzeros": _pack(zeros, AWQ_ORDER), "scales": scales}


def _grouped(weight: Tensor) -> Tensor:
    """(outputs, inputs) as (groups, inputs of a group, outputs)."""
    return weight.T.unflatten(0, (-1, GROUP))


def _four_bits(grouped: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Numbers 0 to 15 (inputs, outputs)."""
    return (grouped / scales[:, None] + zeros[:, None]).round().clamp(0, 15).flatten(0, 1)


def _pack(numbers: Tensor, order: Sequence[int]) -> Tensor:
    """Numbers of 4 bits (rows, columns) as int32 (rows, columns / 8)."""
    import torch

    eights = numbers.long().unflatten(1, (-1, PER_INT32))[..., [*order]]
    return (eights << torch.arange(0, 32, BITS)).sum(-1).int()


def _of(
    name: str, meaning: str, engine: dict[str, Any], quantise: Callable[[Path], None] | None = None
) -> Architecture:
    return Architecture(name, meaning, "LlamaConfig", engine=engine, quantise=quantise)


FORMATS = (
    _of("float16", "weights, activations, KV cache", HALF),
    _of("bfloat16", "weights, activations, KV cache", BRAIN),
    _of("fp8 KV cache, e4m3", "KV cache of 8 bits", {**BRAIN, "kv_cache_dtype": "fp8_e4m3"}),
    _of("fp8 KV cache, e5m2", "KV cache of 8 bits", {**BRAIN, "kv_cache_dtype": "fp8_e5m2"}),
    _of("W8A8", "compressed-tensors: weights and activations in int8", BRAIN, _quantised(W8A8, _int8)),
    _of("GPTQ", "weights of 4 bits, in groups of 32", BRAIN, _quantised(GPTQ, _gptq)),
    _of("AWQ", "weights of 4 bits, in groups of 32", BRAIN, _quantised(AWQ, _awq)),
)
