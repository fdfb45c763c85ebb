"""What searches along catalogs must not come to, on the device: all searches' closed nodes in one tensor.

So searches that exclude different items are selected together. Where its own nodes begin, a row carries in its state.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.search.devices import search_numbers, uploaded_for_search

KIND_BITS = 2  # of a code, for what is closed at its node
NO_ITEM_ENDS, NO_WAY_ON = 1, 2  # its own item; the way to its children
IS_CLOSED = NO_ITEM_ENDS | NO_WAY_ON
PART = 64  # codes, of which a search has a whole number


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
        # [parts * PART] int64: of each search how many codes it has, and then these. The first part has none.
        self.codes = torch.zeros(PART, dtype=torch.int64, device=device)
        self.num_bits = 1  # that the most codes of a search are counted with, so far
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
        parts = self._parts[digest] = range(first, first + num_parts)
        if (missing := parts.stop * PART - len(self.codes)) > 0:
            self.codes = torch.cat([self.codes, self.codes.new_zeros(max(missing, len(self.codes)))])
        self.codes[first * PART : first * PART + len(codes) + 1] = uploaded_for_search(
            np.append(len(codes), codes), self.codes.device
        )
        self.num_bits = max(self.num_bits, len(codes).bit_length())
        self.most_together = max(self.most_together, most_together)

    def drop(self, digest: str) -> None:
        """Forget what a search had, if it is here."""
        self._parts.pop(digest, None)

    def part(self, digest: str | None) -> int:
        """Where the closed nodes of a search begin, in parts; None: it has none."""
        return 0 if digest is None else self._parts[digest].start

    @property
    def for_kernels(self) -> tuple[torch.Tensor, int]:
        """What kernels look up, and with how many bits they count codes of a search."""
        return self.codes, self.num_bits

    def kinds(self, parts: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        """What is closed at nodes of any shape, 0 where nothing is, in searches that begin at these parts."""
        first, codes = parts * PART + 1, self.codes
        place, end = self._first_from(parts, nodes), codes[first - 1]
        code = codes[(first + place).clamp_(max=len(codes) - 1)]
        return (code & (1 << KIND_BITS) - 1).where((place < end) & (code >> KIND_BITS == nodes), 0)

    def kinds_of_children(self, parts: torch.Tensor, first_child: torch.Tensor, most: int) -> torch.Tensor:
        """[..., most] int8, what is closed at the nodes from `first_child` [...] on."""
        first, codes = parts * PART + 1, self.codes
        place = self._first_from(parts, first_child)[..., None] + search_numbers(self.most_together, codes.device)
        code = codes[(first[..., None] + place).clamp_(max=len(codes) - 1)]
        child = (code >> KIND_BITS) - first_child[..., None]
        is_child = (place < codes[first - 1][..., None]) & (child < most)
        kinds = code.new_zeros(*first_child.shape, most + 1, dtype=torch.int8)
        own = (code & (1 << KIND_BITS) - 1).to(torch.int8)
        return kinds.scatter_(-1, child.where(is_child, most), own)[..., :most]

    def _first_from(self, parts: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        """How many codes of a search are of nodes before these."""
        first, codes = parts * PART + 1, self.codes
        num_codes, place = codes[first - 1], torch.zeros_like(nodes)
        for bit in reversed(range(self.num_bits)):
            further = place + (1 << bit)
            last = codes[(first + further - 1).clamp_(max=len(codes) - 1)] >> KIND_BITS
            place = further.where((further <= num_codes) & (last < nodes), place)
        return place
