"""Copies between KV blocks on the device."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch


class KVBlocks:
    """vLLM's KV caches, seen as one row of bytes per KV block, whatever their layout within a block.

    Args:
        kv_caches: One tensor per layer whose first dimension counts blocks, or equal parts of blocks.
        num_blocks: KV blocks as the scheduler counts them.
    """

    def __init__(self, kv_caches: Iterable[torch.Tensor], num_blocks: int) -> None:
        self._layers = [_rows(cache, num_blocks) for cache in _distinct(kv_caches)]

    def copy(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        """Copy whole blocks, in every layer, [copies] each; all are read before any is written."""
        device = self._layers[0].device
        self.copy_on_device(*(torch.from_numpy(blocks).to(device) for blocks in (sources, destinations)))

    def copy_on_device(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """The same for blocks that only the device knows. A block may be copied onto itself."""
        for layer in self._layers:
            layer.index_copy_(0, destinations.long(), layer.index_select(0, sources.long()))


def _distinct(kv_caches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Layers that share a cache hold the same view of it."""
    return list({cache.data_ptr(): cache for cache in kv_caches}.values())


def _rows(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """[num_blocks, ...] view of a cache; of machine words if its blocks lie one after the other."""
    if cache.shape[0] % num_blocks:
        raise ValueError(f"a KV cache of shape {tuple(cache.shape)} does not consist of {num_blocks} blocks")
    if cache.is_contiguous():
        block_bytes = cache.numel() * cache.element_size() // num_blocks
        if block_bytes % 8 == 0:
            return cache.view(-1).view(torch.int64).view(num_blocks, -1)
    return torch.unflatten(cache, 0, (num_blocks, cache.shape[0] // num_blocks))
