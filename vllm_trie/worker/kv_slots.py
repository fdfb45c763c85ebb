"""Copies between the slots of KV blocks: of single tokens, where a forest leaves accepted ones apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_trie.search.devices import sees
from vllm_trie.worker.kv_blocks import WORDS


class KVSlots:
    """vLLM's KV caches, seen token by token.

    Args:
        layers: By KV cache group: what its layers hold, [blocks, block size, ...] each; keys and values apart where
            they do not lie side by side.
    """

    def __init__(self, layers: Sequence[Sequence[torch.Tensor]]) -> None:
        self._layers = [[*{_place(layer): _indexable(layer) for layer in of_group}.values()] for of_group in layers]

    def read(self, number: int, slots: np.ndarray) -> list[Any]:
        """What KV cache group `number` holds in slots [n] int64, which count tokens from block 0 on."""
        at = self._split(number, slots)
        return [layer[at] for layer in self._layers[number]]

    def write(self, number: int, slots: np.ndarray, held: Sequence[Any]) -> None:
        """Let these slots [n] hold what was read of as many others."""
        at = self._split(number, slots)
        for layer, of_layer in zip(self._layers[number], held, strict=True):
            layer[at] = of_layer

    def _split(self, number: int, slots: np.ndarray) -> tuple[Any, Any]:
        """Blocks, and places in them."""
        first = self._layers[number][0]
        blocks, places = divmod(slots, first.shape[1])
        if isinstance(first, np.ndarray):
            return blocks, places
        return async_tensor_h2d(blocks, device=first.device), async_tensor_h2d(places, device=first.device)


def _place(layer: torch.Tensor) -> tuple[object, ...]:
    """Equal for layers that share a cache."""
    return layer.data_ptr(), layer.shape, layer.stride()


def _indexable(layer: torch.Tensor) -> Any:
    """The same memory, as numpy sees it where that is faster: it knows no bfloat16."""
    return layer.view(WORDS[layer.element_size()]).numpy() if sees(layer.device) else layer
