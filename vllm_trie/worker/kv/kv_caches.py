"""Where KV is stored: the blocks of all layers, the tokens in them, and the tables of the blocks of rows."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from vllm_trie.search.devices import is_searched_on_host, uploaded_for_search, uploaded_together_for_search
from vllm_trie.worker.launches import cdiv

COPY_TILE = 1024  # words, or table entries, in one step of a kernel's program
PIECE_BYTES = 1 << 18  # that a host copies at a time: what fits a core's cache
SMALL_BYTES = 1 << 13  # up to this size, copying many entries at a time is faster than one by one
HELD = -1  # in place of a block: the contents that the copier holds
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ByToken(NamedTuple):
    """A layer's KV cache, or a half of it, token by token."""

    contents: torch.Tensor  # [blocks, *places, ...]
    places: tuple[int, ...]  # their product is the block size: tokens are at their places in this order


class TokenStates(Protocol):
    """States that are stored by token besides the KV caches, and copied with them."""

    by_token: ByToken
    number: int  # the KV cache group by whose slots they are stored


class KVTable(NamedTuple):
    """The blocks of rows in a KV cache group."""

    blocks: torch.Tensor  # [slots, columns] int32, at a fixed address
    block_size: int
    number: int = 0  # of the KV cache group


class KVSegments(NamedTuple):
    """Where blocks, or single tokens, are: runs of words, one or more per layer. For kernels."""

    pointers: torch.Tensor  # [segments] uint64, on the device like the next four: addresses in block 0
    of_block: torch.Tensor  # [segments] int64, from block to block, in words
    of_token: torch.Tensor  # [segments] int64, from token to token within a block, in words; for tokens only
    words: torch.Tensor  # [segments] int64, of a block or token
    offsets: torch.Tensor  # [segments] int64, where these begin among all words of a token
    starts: list[int]  # [KV cache groups + 1], first segments: those of a group are consecutive
    num_pieces: int  # tiles of all segments, if all were as long as the longest
    num_tiles: int  # of the longest segment, as a kernel copies it
    total_words: int
    word_bytes: int  # 8, unless a size or address is not a multiple of 8

    @classmethod
    def of(cls, runs: Sequence[Sequence[tuple[int, ...]]], device: torch.device) -> KVSegments:
        """From runs by KV cache group: address, bytes from block to block, from token to token, and of the run."""
        found = [*itertools.chain(*runs)]
        pointers, *sizes = np.array(found, dtype=np.uint64).T
        word_bytes = math.gcd(8, *itertools.chain(*found))
        of_block, of_token, words = (n.astype(np.int64) // word_bytes for n in sizes)
        fields = pointers, of_block, of_token, words, words.cumsum() - words
        starts = [0, *itertools.accumulate(map(len, runs))]
        on_device, num_tiles = uploaded_together_for_search(fields, device), cdiv(int(words.max()), COPY_TILE)
        return cls._make([*on_device, starts, len(found) * num_tiles, num_tiles, int(words.sum()), word_bytes])


class _KVLayer(NamedTuple):
    """A layer's contents by token, as a numpy array on hosts, and a tensor elsewhere."""

    contents: Any  # [blocks, *places, ..., words]
    places: tuple[int, ...]
    in_order: Any  # the same memory [blocks, ..., words], by decreasing strides
    before: tuple[slice, ...]  # its dimensions before the first of the places
    are_runs: bool  # consecutive places are one longer run of words

    @classmethod
    def of(cls, layer: ByToken, is_on_host: bool) -> _KVLayer:
        """The layer of contents that `kv_in_words` has made."""
        contents, places = layer
        axes = sorted(range(1, contents.dim() - 1), key=contents.stride, reverse=True)
        in_order, axis = contents.permute(0, *axes, -1), 1 + axes.index(1)
        are_runs = axis == contents.dim() - 2 and in_order.stride(axis) == in_order.shape[-1]
        if is_on_host:
            return cls(contents.numpy(), places, in_order.numpy(), (slice(None),) * axis, are_runs)
        return cls(contents, places, in_order, (slice(None),) * axis, are_runs)

    def part(self, which: slice) -> Any:
        """[blocks, ..., words], the contents at some of the first places."""
        part = self.in_order[(*self.before, which)]
        return part.reshape(*part.shape[:-2], -1) if self.are_runs else part  # copies nothing


class KVCaches:
    """vLLM's KV caches by block and by token, whatever their layout, and the tables of their blocks.

    Args:
        kv_caches: One tensor per layer whose first dimension counts blocks, or equal parts of blocks.
        num_blocks: KV blocks as the scheduler counts them.
        by_token: By KV cache group, its layers' contents token by token; empty where that is not known.
        tables: Of the KV cache groups whose blocks differ from row to row.
    """

    def __init__(
        self,
        kv_caches: Iterable[torch.Tensor],
        num_blocks: int,
        by_token: Sequence[Sequence[ByToken]] = (),
        tables: Sequence[KVTable] = (),
    ) -> None:
        self._blocks = _distinct_kv_blocks(kv_in_words(_kv_block_view(cache, num_blocks)) for cache in kv_caches)
        self._tokens = [_distinct_kv_layers(of_group) for of_group in by_token]
        self.tables, self.device = tables, self._blocks[0].device
        self._is_on_host = is_searched_on_host(self.device)
        self._indexable_blocks = [self.indexable(blocks) for blocks in self._blocks]
        self._layers = [[_KVLayer.of(layer, self._is_on_host) for layer in of_group] for of_group in self._tokens]
        # By KV cache group, tokens of a block; 0 where the layout of tokens is not known.
        self.tokens_of_block = [math.prod(of_group[0].places) if of_group else 0 for of_group in self._tokens]
        self.block_sizes = np.array([table.block_size for table in tables])

    def copy_blocks(self, pairs: np.ndarray) -> None:
        """Copies whole blocks in all layers, [copies, 2] int64 from, to; all are read before any is written.

        KV cache groups may overlap, so that layers see the same bytes. All sources are copied first only on devices,
        or where groups overlap, and only if a block is both source and destination: a host takes longer to allocate
        such copies than to fill them.
        """
        if set(pairs[:, 0].tolist()).isdisjoint(pairs[:, 1].tolist()):
            at = self.indices(*pairs.T)
            for layer in self._indexable_blocks:
                copy_kv_entries(layer, *at)
            return
        if self._is_on_host and self.are_apart:
            ordered, num_alone = kv_copies_in_order(pairs)
            alone, in_turn = ordered[:num_alone].T, ordered[num_alone:].tolist()
            for layer in self._indexable_blocks:
                copy_kv_entries(layer, *alone)
                copy_kv_blocks_in_turn(layer, in_turn)
            return
        sources, destinations = uploaded_for_search(pairs.T, self.device)
        held = [layer.index_select(0, sources) for layer in self._blocks]
        for layer, blocks in zip(self._blocks, held, strict=True):
            layer.index_copy_(0, destinations, blocks)

    def copy_parts(self, number: int, pairs: np.ndarray, parts: np.ndarray) -> None:
        """Copies parts of blocks to others; no block is both source and destination.

        Args:
            number: The KV cache group, whose layout of tokens is known.
            pairs: [copies, 2] int64 blocks.
            parts: [copies, 2] int64, the first token of each, and where it ends. Neighbours may be copied, too.
        """
        split = dict[tuple[int, ...], list[tuple[slice, tuple[Any, ...]]]]()
        for layer in self._layers[number]:
            if layer.places not in split:  # many layers have it in common
                split[layer.places] = [
                    (which_places, self.indices(*pairs[which].T))
                    for which_places, which in _kv_parts_of_places(layer.places, *parts.T)
                ]
            for which_places, at in split[layer.places]:
                copy_kv_entries(layer.part(which_places), *at)

    def read_tokens(self, number: int, slots: np.ndarray) -> list[Any]:
        """The contents of KV cache group `number` in slots [n] int64, which count tokens from block 0 on."""
        return [contents[at] for contents, at in self._token_contents(number, slots)]

    def write_tokens(self, number: int, slots: np.ndarray, held: Sequence[Any]) -> None:
        """Writes to slots [n] what was read from as many others."""
        for (contents, at), of_layer in zip(self._token_contents(number, slots), held, strict=True):
            contents[at] = of_layer

    def _token_contents(self, number: int, slots: np.ndarray) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """The contents of each layer of a KV cache group, and the indices of slots in it."""
        at = dict[tuple[int, ...], tuple[Any, ...]]()
        for contents, places, *_ in self._layers[number]:
            if places not in at:
                at[places] = self.indices(*np.unravel_index(slots, (len(contents), *places)))
            yield contents, at[places]

    def indexable(self, tensor: torch.Tensor) -> Any:
        """A tensor of this device, as a numpy array on hosts."""
        return tensor.numpy() if self._is_on_host else tensor

    def indices(self, *indices: np.ndarray) -> tuple[Any, ...]:
        """Indices of what `indexable` returns: numpy arrays on hosts, tensors of the device elsewhere."""
        return indices if self._is_on_host else (*uploaded_together_for_search(indices, self.device),)

    @property
    def _block_runs(self) -> list[tuple[int, ...]]:
        return [run for blocks in self._blocks for run in _kv_runs(blocks.unsqueeze(1))]

    @cached_property
    def block_segments(self) -> KVSegments:
        """What a kernel must know to copy blocks."""
        return KVSegments.of([self._block_runs], self.device)

    @cached_property
    def token_segments(self) -> KVSegments:
        """What a kernel must know to copy tokens, which must be stored one by one in their blocks."""
        assert all(len(places) == 1 for of_group in self._tokens for _, places in of_group), "tokens lie in tiles"
        of_groups = [[run for contents, _ in of_group for run in _kv_runs(contents)] for of_group in self._tokens]
        return KVSegments.of(of_groups, self.device)

    @cached_property
    def tables_on_device(self) -> list[torch.Tensor]:
        """[tables] each, what a kernel must know of tables: addresses, entries from slot to slot, and block sizes."""
        pointers = np.array([table.blocks.data_ptr() for table in self.tables], np.uint64)
        strides = np.array([table.blocks.stride(0) for table in self.tables])
        return uploaded_together_for_search([pointers, strides, self.block_sizes], self.device)

    @cached_property
    def are_apart(self) -> bool:
        """Whether no byte of a block belongs to two layers, so that layers may be copied in any order."""
        runs = sorted(self._block_runs)
        for at, (pointer, stride, _, length) in enumerate(runs, start=1):
            for other, other_stride, _, other_length in runs[at:]:
                if other >= pointer + (len(self._blocks[0]) - 1) * stride + length:
                    break
                offset = (other - pointer) % stride
                if other_stride != stride or offset < length or offset + other_length > stride:
                    return False
        return True


def kv_copies_in_order(pairs: np.ndarray) -> tuple[np.ndarray, int]:
    """Copies [n, 2] in an order in which no block is written before it is read.

    In a cycle of copies, one block is held until all others are written: `HELD` stands for it.

    Returns:
        [n or more, 2], and how many of the first ones depend on no other, and can run in parallel.
    """
    is_alone = ~(np.isin(pairs[:, 0], pairs[:, 1]) | np.isin(pairs[:, 1], pairs[:, 0]))
    left = {to: source for source, to in pairs[~is_alone].tolist()}
    readers, ordered = Counter(left.values()), pairs[is_alone].tolist()
    ready = [destination for destination in left if not readers[destination]]
    while left:
        if not ready:  # only cycles are left
            first = next(iter(left))
            ordered.append((first, HELD))
            readers[first] -= 1
            ready.append(first)
            (last,) = (to for to, source in left.items() if source == first)
            left[last] = HELD
        destination = ready.pop()
        source = left.pop(destination)
        ordered.append((source, destination))
        readers[source] -= 1
        if not readers[source] and source in left:
            ready.append(source)
    return np.array(ordered, np.int64), int(is_alone.sum())


def copy_kv_blocks_in_turn(blocks: np.ndarray, ordered: Sequence[tuple[int, int]]) -> None:
    """Copies blocks [n, ...] one after the other, see `kv_copies_in_order`."""
    held = blocks[:0]
    for source, destination in ordered:
        if destination == HELD:
            held = blocks[source].copy()
        else:
            blocks[destination] = held if source == HELD else blocks[source]


def copy_kv_entries(held: Any, sources: Any, destinations: Any) -> None:
    """Copies entries of `held` [n, ...] to others; none is both source and destination."""
    if isinstance(held, torch.Tensor):
        held[destinations] = held[sources]
        return
    if (entry_bytes := held[0].nbytes) > SMALL_BYTES:
        for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
            held[destination] = held[source]  # without the intermediate copy that several need
        return
    at_a_time = PIECE_BYTES // max(entry_bytes, 1)
    for first in range(0, len(sources), at_a_time):
        piece = slice(first, first + at_a_time)
        held[destinations[piece]] = held[sources[piece]]


def kv_in_words(held: torch.Tensor, num_dims: int = 1) -> torch.Tensor:
    """The same memory as [*dims, ..., words]: the later dimensions reordered, and in larger words.

    The last dimension is a contiguous run, which is copied much faster.
    """
    size, length, apart = held.element_size(), held.element_size(), list[tuple[int, int]]()
    for stride, count in sorted(zip(held.stride()[num_dims:], held.shape[num_dims:], strict=True)):
        if stride * size == length or count == 1:
            length *= count
        else:
            apart.insert(0, (stride * size, count))
    strides = [*(stride * size for stride in held.stride()[:num_dims]), *(stride for stride, _ in apart)]
    offset = held.storage_offset() * size
    word_bytes = math.gcd(8, length, offset, *strides)
    shape = *held.shape[:num_dims], *(count for _, count in apart), length // word_bytes
    words = torch.empty(0, dtype=WORDS[word_bytes], device=held.device)
    return words.set_(held.untyped_storage(), offset // word_bytes, shape, [*(n // word_bytes for n in strides), 1])


def _kv_runs(words: torch.Tensor) -> Iterator[tuple[int, ...]]:
    """The contiguous runs of [blocks, tokens, ..., words]: address, bytes along two dimensions, and length."""
    size, (of_block, of_token, *strides, _) = words.element_size(), words.stride()
    apart = [range(0, stride * count, stride) for stride, count in zip(strides, words.shape[2:-1], strict=True)]
    for offsets in itertools.product(*apart):
        yield words.data_ptr() + sum(offsets) * size, of_block * size, of_token * size, words.shape[-1] * size


def _distinct_kv_layers(layers: Iterable[ByToken]) -> list[ByToken]:
    """Layers without those that share a cache with an earlier one, and so have the same tokens."""
    in_words = (ByToken(kv_in_words(contents, 1 + len(places)), places) for contents, places in layers)
    return [*{_kv_place(layer.contents): layer for layer in in_words}.values()]


def _distinct_kv_blocks(layers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Layers without those that share a cache with another one. Where KV cache groups overlap, one view is enough.

    A block belongs to one group. If it is a single run of bytes, the longest run copies what any of the groups wrote.
    """
    distinct = dict[object, torch.Tensor]()
    for blocks in layers:
        place = _kv_place(blocks)
        if place not in distinct or blocks.nbytes > distinct[place].nbytes:
            distinct[place] = blocks
    return [*distinct.values()]


def _kv_place(words: torch.Tensor) -> tuple[object, ...]:
    """Equal for layers at the same place; for blocks that are a single run, for all that begin there."""
    start = words.data_ptr(), words.stride(0) * words.element_size()
    return start if words.dim() == 2 else (*start, words.dtype, words.shape, words.stride())


def _kv_parts_of_places(
    places: tuple[int, ...], first: np.ndarray, end: np.ndarray
) -> Iterator[tuple[slice, np.ndarray]]:
    """Splits copies of tokens `first` [copies] to `end` [copies] of blocks by the range of first places that they need.

    Yields:
        A range of the first dimension of places, and [copies] bool, the copies that need it.
    """
    of_place, num_places = math.prod(places[1:]), places[0] + 1
    keys = first // of_place * num_places - (-end // of_place)
    for key in {*keys.tolist()}:
        yield slice(*divmod(key, num_places)), keys == key


def _kv_block_view(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """[num_blocks, ...] view of a cache."""
    if cache.shape[0] % num_blocks:
        raise ValueError(f"a KV cache of shape {tuple(cache.shape)} does not consist of {num_blocks} blocks")
    return torch.unflatten(cache, 0, (num_blocks, cache.shape[0] // num_blocks))
