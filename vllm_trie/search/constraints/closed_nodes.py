"""The catalog nodes that searches exclude, on the device: the closed nodes of all searches in one tensor.

This lets searches that exclude different items share a step: each row's state has where its search's nodes begin.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.search.devices import search_arange, uploaded_for_search

KIND_BITS = 2  # of a code, for what is closed at its node
NO_ITEM_ENDS, NO_WAY_ON = 1, 2  # the item that ends at a node; the way to its children
IS_CLOSED = NO_ITEM_ENDS | NO_WAY_ON
PART = 512  # codes; each search has a whole number of parts
PART_SHIFT = 44  # bits of a code below the number of the part in which its search begins
MOST_CODE = (1 << PART_SHIFT) - 1
LEAST_PARTS = 64  # to allocate once any search has closed nodes: 256 KiB
# Bits in which the codes of a search are counted: few values, because CUDA graphs fix addresses and lengths.
COUNT_BITS = (10, 14, 18, 24, 31)


class NodeCodes(NamedTuple):
    """The closed nodes of a search along a catalog.

    Args:
        codes: [n] int64, ascending: each node shifted by `KIND_BITS`, and what is closed at it.
        most_together: The most of them that have the same parent.
    """

    codes: np.ndarray
    most_together: int


class ClosedNodes:
    """The closed nodes of the searches on a device.

    Args:
        device: The search's device.
    """

    def __init__(self, device: torch.device) -> None:
        # [parts * PART] int64, ascending: codes of a search, with its first part in the upper bits. Unused entries hold
        # what sorts after all codes of their part. Part 0 has no codes.
        self.codes = _unused(range(1), device)
        self.num_bits = COUNT_BITS[0]  # enough to count the codes of any search so far
        self.most_together = 1  # the most closed nodes with the same parent so far
        self._parts: dict[str, range] = {}  # by digest

    def add(self, digest: str, nodes: NodeCodes) -> None:
        """Adds the closed nodes of a search."""
        codes, most_together = nodes
        num_parts, first = len(codes) // PART + 1, 1
        for parts in sorted(self._parts.values(), key=lambda parts: parts.start):
            if parts.start - first >= num_parts:
                break
            first = parts.stop
        parts, num_there = range(first, first + num_parts), len(self.codes) // PART
        if parts.stop > num_there:
            self.codes = torch.cat(
                [self.codes, _unused(range(num_there, max(parts.stop, 2 * num_there, LEAST_PARTS)), self.codes.device)]
            )
        own = np.full(num_parts * PART, MOST_CODE, np.int64)
        own[: len(codes)] = codes
        self._parts[digest] = parts
        self.codes[_places(parts)] = uploaded_for_search(own + (first << PART_SHIFT), self.codes.device)
        self.num_bits = max(self.num_bits, COUNT_BITS[bisect_left(COUNT_BITS, len(codes).bit_length())])
        self.most_together = max(self.most_together, most_together)

    def drop(self, digest: str) -> None:
        """Removes the closed nodes of a search, if it has any."""
        if (parts := self._parts.pop(digest, None)) is not None:
            if self._parts:
                self.codes[_places(parts)] = _unused(parts, self.codes.device)
            else:
                self.codes = _unused(range(1), self.codes.device)

    def part(self, digest: str | None) -> int:
        """The part at which the closed nodes of a search begin; 0 for None, a search without any."""
        return 0 if digest is None else self._parts[digest].start

    @property
    def for_kernels(self) -> tuple[torch.Tensor, int, int]:
        """The codes, how many there are, and in how many bits kernels count the codes of a search."""
        return self.codes, len(self.codes), self.num_bits

    def kinds(self, parts: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        """What is closed at nodes of any shape, 0 for nothing, in the searches that begin at `parts`."""
        first = (parts << PART_SHIFT) + (nodes << KIND_BITS)
        code = self.codes[torch.searchsorted(self.codes, first)] - first
        return code.where(code < 1 << KIND_BITS, 0)

    def kinds_of_children(self, parts: torch.Tensor, first_child: torch.Tensor, most: int) -> torch.Tensor:
        """[..., most] int8, what is closed at the `most` nodes from `first_child` [...] on."""
        first = (parts << PART_SHIFT) + (first_child << KIND_BITS)
        place = torch.searchsorted(self.codes, first)[..., None] + search_arange(
            min(self.most_together, most), first.device
        )
        code = self.codes[place.clamp_(max=len(self.codes) - 1)] - first[..., None]
        child = (code >> KIND_BITS).clamp_(max=most)
        kinds = torch.zeros(*first.shape, most + 1, dtype=torch.int8, device=first.device)
        return kinds.scatter_(-1, child, (code & (1 << KIND_BITS) - 1).to(torch.int8))[..., :most]


def _places(parts: range) -> slice:
    return slice(parts.start * PART, parts.stop * PART)


def _unused(parts: range, device: torch.device) -> torch.Tensor:
    """The entries of parts that no search uses."""
    numbers = torch.arange(parts.start, parts.stop, device=device)
    return (numbers << PART_SHIFT).repeat_interleave(PART) + MOST_CODE
