"""Ids of items in a request. They may be many: read once, they are bytes, which nobody copies or looks through."""

from __future__ import annotations

import json
import struct
from typing import Any, Self

import numpy as np

MOST_EXCLUDED = 100_000  # items that a request must not return; more make a list of the engine


class ItemIds(bytes):
    """[n] int64, in the order in which they came."""

    @classmethod
    def of(cls, ids: Any) -> Self:
        """Those of a list.

        Raises:
            ValueError: it is none, or has what is no integer of 64 bits.
        """
        if isinstance(ids, cls):
            return ids
        if not isinstance(ids, list) or [*map(type, ids)].count(int) < len(ids):
            raise ValueError("no list of integers")
        try:
            return cls(struct.pack(f"={len(ids)}q", *ids))
        except struct.error:
            raise ValueError("an integer has more than 64 bits") from None

    @property
    def numbers(self) -> np.ndarray:
        """[n] int64."""
        return np.frombuffer(self, np.int64)

    def __repr__(self) -> str:
        return f"<{len(self) // 8:,} item ids>"

    def __deepcopy__(self, memo: Any) -> Self:
        return self


def read_item_ids(text: str) -> Any:
    """What a JSON text says. A list of numbers as programs write it becomes `ItemIds`, in a third of the time.

    Raises:
        ValueError: it is no JSON; zeros in front of a number may pass.
    """
    raw = text.encode() if text.isascii() else b""
    numbers, marks = raw[1:-1], raw.translate(None, b"0123456789")
    separator = b", " if b", " in raw else b","
    num_separators = raw.count(b",")
    is_list = raw[:1] + raw[-1:] == b"[]" and marks == b"[" + separator * num_separators + b"]"
    if is_list and num_separators < MOST_EXCLUDED and 2 * separator not in separator + numbers + separator:
        ids = np.fromstring(numbers, np.int64, sep=",")
        # Of what is no JSON it may read a part; of what is larger it makes the largest.
        if len(ids) == num_separators + 1 and ids.max() < np.iinfo(np.int64).max:
            return ItemIds(ids.tobytes())
    return json.loads(text)
