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
        if not isinstance(ids, list) or {*map(type, ids)} - {int}:
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
    """What a JSON text says: `ItemIds`, where it is a list of numbers as programs write it, which takes a third as long.

    Raises:
        ValueError: it is no JSON.
    """
    raw = text.encode() if text.isascii() else b""
    sep = b", " if b", " in raw else b","
    numbers, marks = raw[1:-1], raw.translate(None, b"0123456789")
    is_plain = raw.count(b",") < MOST_EXCLUDED and raw[:1] + raw[-1:] == b"[]" and marks == b"[" + sep * raw.count(b",") + b"]"
    if is_plain and 2 * sep not in sep + numbers + sep:
        ids = np.fromstring(numbers, np.int64, sep=",")
        if ids.max() < np.iinfo(np.int64).max:  # where it stops at what is larger
            return ItemIds(ids.tobytes())
    return json.loads(text)
