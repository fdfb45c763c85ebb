"""Copies between the slots of KV blocks: of single tokens, where a forest leaves accepted ones apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d


class KVSlots:
    """vLLM's KV caches, seen token by token.

    Args:
        layers: By KV cache group: what its layers hold, [blocks, block size, ...] each; keys and values apart where
            they do not lie side by side.
    """

    def __init__(self, layers: Sequence[Sequence[torch.Tensor]]) -> None:
        self._layers = [[*{_place(layer): layer for layer in of_group}.values()] for of_group in layers]

    def read(self, number: int, slots: np.ndarray) -> list[torch.Tensor]:
        """What KV cache group `number` holds in slots [n] int64, which count tokens from block 0 on."""
        return [layer[_split(layer, slots)] for layer in self._layers[number]]

    def write(self, number: int, slots: np.ndarray, held: Sequence[torch.Tensor]) -> None:
        """Let these slots [n] hold what was read of as many others."""
        for layer, of_layer in zip(self._layers[number], held, strict=True):
            layer[_split(layer, slots)] = of_layer


def _place(layer: torch.Tensor) -> tuple[object, ...]:
    """Equal for layers that share a cache."""
    return layer.data_ptr(), layer.shape, layer.stride()


def _split(layer: torch.Tensor, slots: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks, and places in them."""
    blocks, places = async_tensor_h2d(np.stack(divmod(slots, layer.shape[1])), device=layer.device)
    return blocks, places
