"""Copies between KV blocks on the device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.search.devices import is_searched_on_host, uploaded_for_search
from vllm_trie.worker.launches import cdiv

COPY_TILE = 1024  # words, or table entries, that one program of a kernel copies at a time
PIECE_BYTES = 1 << 18  # that a host copies at a time: what stays in a core's cache
SMALL_BYTES = 1 << 13  # up to which it copies many entries at a time faster than one by one
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Segments(NamedTuple):
    """Where the blocks of all layers lie: a block is so many words in a row, once or more often per layer.

    Kernels copy a tile of a segment at a time, and take all but the last field, in this order.
    """

    pointers: torch.Tensor  # [segments] uint64 on the device, to block 0
    strides: torch.Tensor  # [segments] int64, from block to block, in words
    words: torch.Tensor  # [segments] int64, of one block
    num_pieces: int  # tiles of all segments, if all were as long as the longest
    num_tiles: int  # of the longest segment
    word_bytes: int  # 8, unless some block is not a whole number of these


class KVBlocks:
    """vLLM's KV caches, seen block by block, whatever their layout within a block.

    Args:
        kv_caches: One tensor per layer whose first dimension counts blocks, or equal parts of blocks.
        num_blocks: KV blocks as the scheduler counts them.
    """

    def __init__(self, kv_caches: Iterable[torch.Tensor], num_blocks: int) -> None:
        self._layers = _distinct_kv_layers(_kv_block_view(cache, num_blocks) for cache in kv_caches)
        self.device = self._layers[0].device

    def copy(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        """Copy whole blocks, in every layer, [copies] each. A block may be copied onto itself.

        KV cache groups may lie over each other, so that layers see the same bytes: hence all are read first.
        """
        read, written = uploaded_for_search(np.stack([sources, destinations]).astype(np.int64), self.device)
        copies = [layer.index_select(0, read) for layer in self._layers]
        for layer, blocks in zip(self._layers, copies, strict=True):
            layer.index_copy_(0, written, blocks)

    def copy_to_others(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """The same where no block is both source and destination: so there is no need to hold copies of all of them.

        In a host's memory they cost more to have than to fill.
        """
        sources, destinations = sources.long(), destinations.long()
        for layer in self._layers:
            if not is_searched_on_host(layer.device):
                layer.index_copy_(0, destinations, layer.index_select(0, sources))
                continue
            copy_kv_entries(layer.numpy(), sources.numpy(), destinations.numpy())

    @cached_property
    def segments(self) -> Segments:
        """What a kernel must know to copy blocks."""
        pointers, strides, lengths = zip(*itertools.chain(*map(kv_segments_of, self._layers)), strict=True)
        word_bytes = math.gcd(8, *pointers, *strides, *lengths)
        device = self.device

        def in_words(values: Iterable[int]) -> torch.Tensor:
            return uploaded_for_search(np.array([value // word_bytes for value in values]), device)

        to_blocks = uploaded_for_search(np.array(pointers, np.uint64), device)
        num_tiles = cdiv(max(lengths) // word_bytes, COPY_TILE)
        words = in_words(strides), in_words(lengths)
        return Segments(to_blocks, *words, len(pointers) * num_tiles, num_tiles, word_bytes)

    @cached_property
    def are_apart(self) -> bool:
        """Whether no byte of a block belongs to two layers, so that each layer may be copied when it likes."""
        num_blocks, segments = len(self._layers[0]), sorted(itertools.chain(*map(kv_segments_of, self._layers)))
        for at, (pointer, stride, length) in enumerate(segments, start=1):
            for other, other_stride, other_length in segments[at:]:
                if other >= pointer + (num_blocks - 1) * stride + length:
                    break
                offset = (other - pointer) % stride
                if other_stride != stride or offset < length or offset + other_length > stride:
                    return False
        return True


def copy_kv_entries(held: np.ndarray, sources: np.ndarray, destinations: np.ndarray) -> None:
    """Copy entries of `held` [n, ...] to others, on a host; none is both source and destination."""
    if (entry_bytes := held[0].nbytes) > SMALL_BYTES:
        for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
            held[destination] = held[source]  # with no copy in between, as there is of several
        return
    at_a_time = PIECE_BYTES // max(entry_bytes, 1)
    for first in range(0, len(sources), at_a_time):
        piece = slice(first, first + at_a_time)
        held[destinations[piece]] = held[sources[piece]]


def _distinct_kv_layers(layers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Layers that share a cache see the same blocks. Where KV cache groups lie over each other, one view will do.

    A block belongs to one group. If it is a single run of bytes, the longest run copies what any of the groups wrote.
    """
    distinct: dict[object, torch.Tensor] = {}
    for blocks in layers:
        (pointer, stride, _), *others = kv_segments_of(blocks)
        place = (pointer, blocks.dtype, blocks.shape, blocks.stride()) if others else (pointer, stride)
        if place not in distinct or blocks.nbytes > distinct[place].nbytes:
            distinct[place] = blocks
    return list(distinct.values())


def _kv_block_view(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """[num_blocks, ...] view of a cache; of machine words if its blocks lie one after the other, else of integers."""
    if cache.shape[0] % num_blocks:
        raise ValueError(f"a KV cache of shape {tuple(cache.shape)} does not consist of {num_blocks} blocks")
    if cache.is_contiguous():
        block_bytes = cache.numel() * cache.element_size() // num_blocks
        if block_bytes % 8 == 0:
            return cache.view(-1).view(torch.int64).view(num_blocks, -1)
    words = cache.view(WORDS[cache.element_size()])
    return torch.unflatten(words, 0, (num_blocks, cache.shape[0] // num_blocks))


def kv_segments_of(blocks: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Pointer to block 0, bytes from block to block, and bytes of a block, of each dense part of blocks [blocks, ...].

    Heads may lie apart, and a block of one layer between blocks of others.
    """
    size = blocks.element_size()
    inner = sorted((stride * size, count) for stride, count in zip(blocks.stride()[1:], blocks.shape[1:], strict=True))
    length, apart = size, []
    for stride, count in inner:
        if count == 1:
            continue
        if stride == length:
            length *= count
        else:
            apart.append(range(0, stride * count, stride))
    for offsets in itertools.product(*apart):
        yield blocks.data_ptr() + sum(offsets), blocks.stride(0) * size, length
