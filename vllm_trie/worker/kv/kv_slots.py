"""Copies between the slots of KV blocks: of single tokens, where a forest leaves accepted ones apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from vllm_trie.search.devices import is_searched_on_host, uploaded_for_search
from vllm_trie.worker.kv.kv_blocks import WORDS, copy_kv_entries, kv_segments_of


class ByToken(NamedTuple):
    """What a layer's KV cache holds, or a half of it, token by token."""

    contents: torch.Tensor  # [blocks, *places, ...]
    places: tuple[int, ...]  # whose product is the block size: a token is at its place in that order


class TokenStates(Protocol):
    """What lies by token beside the KV caches, and is copied with them."""

    by_token: ByToken
    number: int  # of the KV cache group by whose slots it lies


class TokenSegments(NamedTuple):
    """Where layers hold a token: so many words in a row, once or more often per layer; on the device.

    The segments of a KV cache group come one after the other.
    """

    pointers: torch.Tensor  # [segments] uint64, to the first token of block 0
    # [4, segments] int64, in words: from block to block, from token to token within a block, of one token, and where
    # these begin among all words of a token
    sizes: torch.Tensor
    groups: tuple[tuple[int, int, int], ...]  # by KV cache group: first segment, last but one, and block size
    token_words: int
    word_bytes: int


class KVSlots:
    """vLLM's KV caches, seen token by token.

    Args:
        layers: By KV cache group: what its layers hold.
    """

    def __init__(self, layers: Sequence[Sequence[ByToken]]) -> None:
        self._given = layers
        self._layers = [
            [*{_kv_layer_place(layer): _indexable_kv_layer(layer) for layer in of_group}.values()]
            for of_group in layers
        ]

    def read(self, number: int, slots: np.ndarray) -> list[Any]:
        """What KV cache group `number` holds in slots [n] int64, which count tokens from block 0 on."""
        at = self._split(number, slots)
        return [layer.contents[at[layer.places]] for layer in self._layers[number]]

    def write(self, number: int, slots: np.ndarray, held: Sequence[Any]) -> None:
        """Let these slots [n] hold what was read of as many others."""
        at = self._split(number, slots)
        for layer, of_layer in zip(self._layers[number], held, strict=True):
            layer.contents[at[layer.places]] = of_layer

    def knows(self, number: int) -> bool:
        """Whether it is known how tokens lie in the blocks of a KV cache group."""
        return bool(self._layers[number])

    def copy_parts(self, number: int, sources: torch.Tensor, destinations: torch.Tensor, parts: torch.Tensor) -> None:
        """Copy parts of blocks to others; no block is both source and destination.

        Args:
            number: Of their KV cache group.
            sources, destinations: [copies] blocks.
            parts: [2, copies], the first token of each, and where it ends. Some tokens beside them may be copied, too.
        """
        read, written, split = sources.numpy(), destinations.numpy(), dict[tuple[int, ...], list[_Part]]()
        for layer in self._layers[number]:
            if layer.places not in split:  # which many layers have in common
                split[layer.places] = [*_kv_slot_parts(layer.places, *parts.numpy())]
            for places, which in split[layer.places]:
                copy_kv_entries(kv_in_words(layer.contents[:, places]), read[which], written[which])

    @cached_property
    def segments(self) -> TokenSegments | None:
        """What a kernel must know to copy tokens; None where some lie in their blocks otherwise than one by one."""
        if any(len(layer.places) > 1 for of_group in self._given for layer in of_group):
            return None
        found, groups = list[tuple[int, int, int, int]](), list[tuple[int, int, int]]()
        for of_group in self._given:
            first = len(found)
            for contents, _ in {_kv_layer_place(layer): layer for layer in of_group}.values():
                of_place = contents.stride(1) * contents.element_size()
                found += [(start, stride, of_place, n) for start, stride, n in kv_segments_of(contents.select(1, 0))]
            groups.append((first, len(found), of_group[0].places[0] if of_group else 1))
        pointers, *sizes = np.array(found, dtype=np.uint64).T
        device, word_bytes = self._given[0][0].contents.device, math.gcd(8, *chain(*found))
        of_block, of_place, words = (n.astype(np.int64) // word_bytes for n in sizes)
        on_host = np.stack([of_block, of_place, words, words.cumsum() - words])
        to_tokens = uploaded_for_search(pointers.copy(), device)
        return TokenSegments(
            to_tokens, uploaded_for_search(on_host, device), tuple(groups), int(words.sum()), word_bytes
        )

    def _split(self, number: int, slots: np.ndarray) -> dict[tuple[int, ...], tuple[Any, ...]]:
        """By the places of layers: blocks, and places in them."""
        split = {}
        for layer in self._layers[number]:
            if layer.places not in split:
                blocks, of_block = divmod(slots, math.prod(layer.places))
                at = blocks, *np.unravel_index(of_block, layer.places)
                split[layer.places] = (
                    at if isinstance(layer.contents, np.ndarray) else _uploaded_kv_index(at, layer.contents)
                )
        return split


class _Part(NamedTuple):
    """What the same part of their blocks is copied of."""

    places: slice  # of the first dimension of places
    which: np.ndarray  # [copies] bool


def _kv_slot_parts(places: tuple[int, ...], first: np.ndarray, end: np.ndarray) -> Iterator[_Part]:
    """Tokens `first` [copies] to `end` [copies] of blocks, and whatever lies at the same places."""
    of_place, num_places = math.prod(places[1:]), places[0] + 1
    keys = first // of_place * num_places - (-end // of_place)
    for key in np.unique(keys).tolist():
        yield _Part(slice(*divmod(key, num_places)), keys == key)


def kv_in_words(held: np.ndarray) -> np.ndarray:
    """Entries [n, ...] in other order and larger words, as far as they lie in a row: copied much faster."""
    apart, length = list[tuple[int, int]](), held.itemsize
    for stride, count in sorted(zip(held.strides[1:], held.shape[1:], strict=True)):
        if stride == length or count == 1:
            length *= count
        else:
            apart.insert(0, (stride, count))
    strides, counts = zip((held.strides[0], len(held)), *apart, (held.itemsize, length // held.itemsize), strict=True)
    rows = as_strided(held, counts, strides)
    word_bytes = math.gcd(8, length, held.ctypes.data, *strides[:-1])
    return rows.view(f"i{word_bytes}")


def _uploaded_kv_index(at: Sequence[np.ndarray], like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(uploaded_for_search(of_dim, like.device) for of_dim in at)


def _kv_layer_place(layer: ByToken) -> tuple[object, ...]:
    """Equal for layers that share a cache."""
    return layer.contents.data_ptr(), layer.contents.shape, layer.contents.stride()


def _indexable_kv_layer(layer: ByToken) -> Any:
    """The same memory, as numpy sees it where that is faster: it knows no bfloat16."""
    contents = layer.contents
    if not is_searched_on_host(contents.device):
        return layer
    return layer._replace(contents=contents.view(WORDS[contents.element_size()]).numpy())  # type: ignore[arg-type]
