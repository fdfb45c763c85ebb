"""Entries of block tables that the host has changed, to be written to the tables on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class DraftTableEntries(NamedTuple):
    """Changed entries of one group's rows, in the block table of one KV cache group; n of them."""

    slots: np.ndarray  # [rows]
    number: int  # of the KV cache group
    num_blocks: int  # of each row, after the change
    at: np.ndarray  # [2, n] int64, slots and columns
    blocks: np.ndarray  # [n] int32

    @classmethod
    def of(
        cls, slots: np.ndarray, number: int, table: np.ndarray, first: int = 0, known: np.ndarray | None = None
    ) -> DraftTableEntries:
        """The entries of a table that must be written.

        Args:
            slots: [rows].
            number: The KV cache group.
            table: [rows, columns] int32.
            first: The first column to write.
            known: [rows, columns or more], what the device has; None: write everything.
        """
        num_blocks, changed = table.shape[1], np.ones(table.shape, bool)
        if known is not None:
            changed = table != known[:, :num_blocks]
        changed[:, :first] = False
        rows, columns = changed.nonzero()
        return cls(slots, number, num_blocks, np.stack([slots[rows], columns]), table[rows, columns])


def draft_tables_side_by_side(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of all arrays [rows, columns], padded with zeros on the right to the widest."""
    width = max(array.shape[1] for array in arrays)
    return np.concatenate([np.pad(array, ((0, 0), (0, width - array.shape[1]))) for array in arrays])
