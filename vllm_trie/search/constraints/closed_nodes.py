"""What searches along catalogs must not come to, on the device: all searches' closed nodes in one tensor.

So searches that exclude different items are selected together. Where its own nodes begin, a row carries in its state.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.search.devices import search_numbers, uploaded_for_search

KIND_BITS = 2  # of a code, for what is closed at its node
NO_ITEM_ENDS, NO_WAY_ON = 1, 2  # its own item; the way to its children
IS_CLOSED = NO_ITEM_ENDS | NO_WAY_ON
PART = 512  # codes, of which a search has a whole number
PART_SHIFT = 44  # bits of a code below the part in which its search begins
MOST_CODE = (1 << PART_SHIFT) - 1
LEAST_PARTS = 64  # that there is room for, as soon as there are any: 256 KiB
# With which the codes of a search are counted: few steps, and so few lengths, as CUDA graphs know places and lengths.
COUNT_BITS = (10, 14, 18, 24, 31)


class NodeCodes(NamedTuple):
    """The closed nodes of a search along a catalog.

    Args:
        codes: [n] int64, ascending: each node, shifted by `KIND_BITS`, and what is closed there.
        most_together: How many of them have one parent, at most.
    """

    codes: np.ndarray
    most_together: int


class ClosedNodes:
    """The closed nodes of some searches.

    Args:
        device: Where the search is.
    """

    def __init__(self, device: torch.device) -> None:
        # [parts * PART] int64, ascending: codes of a search, and above them in which part it begins; then as a rule
        # what comes after all codes of that part. The first part has none.
        self.codes = _unused(range(1), device)
        self.num_bits = COUNT_BITS[0]  # that the most codes of a search are counted with, so far
        self.most_together = 1  # closed nodes of one parent, so far
        self._parts: dict[str, range] = {}  # by digest

    def add(self, digest: str, nodes: NodeCodes) -> None:
        """Take in those of a search."""
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
        """Forget what a search had, if it is here."""
        if (parts := self._parts.pop(digest, None)) is not None:
            if self._parts:
                self.codes[_places(parts)] = _unused(parts, self.codes.device)
            else:
                self.codes = _unused(range(1), self.codes.device)

    def part(self, digest: str | None) -> int:
        """Where the closed nodes of a search begin, in parts; None: it has none."""
        return 0 if digest is None else self._parts[digest].start

    @property
    def for_kernels(self) -> tuple[torch.Tensor, int, int]:
        """What kernels look up, its length, and with how many bits they count codes of a search."""
        return self.codes, len(self.codes), self.num_bits

    def kinds(self, parts: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        """What is closed at nodes of any shape, 0 where nothing is, in searches that begin at these parts."""
        first = (parts << PART_SHIFT) + (nodes << KIND_BITS)
        code = self.codes[torch.searchsorted(self.codes, first)] - first
        return code.where(code < 1 << KIND_BITS, 0)

    def kinds_of_children(self, parts: torch.Tensor, first_child: torch.Tensor, most: int) -> torch.Tensor:
        """[..., most] int8, what is closed at the nodes from `first_child` [...] on."""
        first = (parts << PART_SHIFT) + (first_child << KIND_BITS)
        place = torch.searchsorted(self.codes, first)[..., None] + search_numbers(
            min(self.most_together, most), first.device
        )
        code = self.codes[place.clamp_(max=len(self.codes) - 1)] - first[..., None]
        child = (code >> KIND_BITS).clamp_(max=most)
        kinds = torch.zeros(*first.shape, most + 1, dtype=torch.int8, device=first.device)
        return kinds.scatter_(-1, child, (code & (1 << KIND_BITS) - 1).to(torch.int8))[..., :most]


def _places(parts: range) -> slice:
    return slice(parts.start * PART, parts.stop * PART)


def _unused(parts: range, device: torch.device) -> torch.Tensor:
    """What is in parts that no search has."""
    numbers = torch.arange(parts.start, parts.stop, device=device)
    return (numbers << PART_SHIFT).repeat_interleave(PART) + MOST_CODE
