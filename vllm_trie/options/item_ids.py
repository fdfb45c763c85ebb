"""The option `exclude_items` of a request: ids are parsed once into bytes, since there may be 100,000 of them."""

from __future__ import annotations

import json
import struct
from typing import Any, Self

import numpy as np

MOST_EXCLUDED = 100_000  # ids in a request; longer lists belong in the engine's option `exclude`


class ItemIds(bytes):
    """Item ids [n] int64 as bytes, ascending, each once: equal sets are equal, and looked up once."""

    @classmethod
    def of(cls, ids: Any) -> Self:
        """Pack a list, tuple, set or array [n] of integers.

        Raises:
            ValueError: `ids` is none of these, has more than `MOST_EXCLUDED`, or one has more than 64 bits.
        """
        if isinstance(ids, cls):
            return ids
        is_array = isinstance(ids, np.ndarray) and ids.ndim == 1
        if not (is_array or isinstance(ids, list | tuple | set | frozenset)) or len(ids) > MOST_EXCLUDED:
            raise ValueError("not a list, or too long")
        ids = ids.tolist() if is_array else [*ids]
        if [*map(type, ids)].count(int) < len(ids) and not all(_is_integer(own_id) for own_id in ids):
            raise ValueError("not a list of integers")
        try:
            packed = struct.pack(f"={len(ids)}q", *ids)
        except struct.error:
            raise ValueError("an integer has more than 64 bits") from None
        return cls._sorted(np.frombuffer(packed, np.int64))

    @classmethod
    def _sorted(cls, ids: np.ndarray) -> Self:
        ids = np.sort(ids)
        if (ids[1:] == ids[:-1]).any():
            ids = np.unique(ids)
        return cls(ids.tobytes())

    @property
    def numbers(self) -> np.ndarray:
        """The ids [n] int64, without a copy."""
        return np.frombuffer(self, np.int64)

    def __repr__(self) -> str:
        return f"<{len(self) // 8:,} item ids>"

    def __deepcopy__(self, memo: Any) -> Self:
        return self


def _is_integer(own_id: Any) -> bool:
    return type(own_id) is int or isinstance(own_id, np.integer)


def read_item_ids(text: str) -> Any:
    """Parse a JSON text. A list of numbers with uniform separators becomes `ItemIds`, in a third of the time.

    Raises:
        ValueError: it is not JSON; leading zeros of a number may pass.
    """
    raw = text.encode() if text.isascii() else b""
    numbers, marks = raw[1:-1], raw.translate(None, b"0123456789")
    separator = b", " if b", " in raw else b","
    num_separators = raw.count(b",")
    is_list = raw[:1] + raw[-1:] == b"[]" and marks == b"[" + separator * num_separators + b"]"
    if is_list and num_separators < MOST_EXCLUDED and 2 * separator not in separator + numbers + separator:
        ids = np.fromstring(numbers, np.int64, sep=",")
        # `fromstring` stops early at what is not a number, and clips larger numbers to the maximum.
        if len(ids) == num_separators + 1 and ids.max() < np.iinfo(np.int64).max:
            return ItemIds._sorted(ids)
    return json.loads(text)
