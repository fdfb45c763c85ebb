"""The items of a catalog before it is built: token sequences, concatenated in one array, with their ids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from operator import index
from typing import Any

import numpy as np

MOST_TOKENS = (1 << 31) - 1  # token ids are below, so that two of them, or a node and a token, fit into an int64


@dataclass(frozen=True)
class CatalogItems:
    """Some items, duplicates included."""

    tokens: np.ndarray  # [sum of lengths] int32
    lengths: np.ndarray  # [items] int32, at least 1
    ids: np.ndarray  # [items] int64, not negative

    @classmethod
    def of(
        cls, sequences: Sequence[Sequence[int]], ids: Any, vocab_size: int | None, name: Callable[[int], str]
    ) -> CatalogItems:
        """Check and concatenate sequences.

        Args:
            ids: One integer per sequence.
            vocab_size: Token ids must be below this.
            name: Names the sequence with some index in errors.

        Raises:
            ValueError: a sequence is empty, or a token id or id is not valid.
        """
        try:
            lengths = np.fromiter(map(len, sequences), np.int32, len(sequences))
            flat = map(index, chain.from_iterable(sequences))
            tokens = np.fromiter(flat, np.int64, int(lengths.sum(dtype=np.int64)))
        except (TypeError, OverflowError):
            bad = next(i for i, sequence in enumerate(sequences) if not _are_catalog_tokens(sequence))
            raise ValueError(f"{name(bad)} is not a list of token ids but {str(sequences[bad])[:60]}") from None
        if not lengths.all():
            raise ValueError(f"{name(int(lengths.argmin()))} has no tokens")
        limit = vocab_size or MOST_TOKENS
        outside = (tokens < 0) | (tokens >= limit)
        if outside.any():
            first = int(outside.argmax())
            bad = int(np.searchsorted(lengths.cumsum(dtype=np.int64), first, side="right"))
            raise ValueError(f"{name(bad)} has token {tokens[first]}; tokens are 0 to {limit - 1}")
        return cls(tokens.astype(np.int32), lengths, _catalog_item_ids(ids, len(lengths), name))

    @classmethod
    def joined(cls, parts: Iterable[CatalogItems]) -> CatalogItems:
        """All items of one or more parts."""
        columns = zip(*((part.tokens, part.lengths, part.ids) for part in parts), strict=True)
        return cls(*map(np.concatenate, columns))


def _are_catalog_tokens(sequence: Any) -> bool:
    return isinstance(sequence, Collection) and all(_fits_catalog_id(token) for token in sequence)


def _fits_catalog_id(number: Any) -> bool:
    """Whether it is an integer of 64 bits."""
    return isinstance(number, Integral) and -1 << 63 <= int(number) < 1 << 63


def _catalog_item_ids(ids: Any, count: int, name: Callable[[int], str]) -> np.ndarray:
    if len(ids) != count:
        raise ValueError(f"{len(ids)} ids do not match {count} sequences; pass one for each")
    try:
        array = np.fromiter(map(index, ids), np.int64, count)
        is_wrong = array < 0
    except (TypeError, OverflowError):
        is_wrong = np.array([not _fits_catalog_id(own_id) or own_id < 0 for own_id in ids])
    if is_wrong.any():
        bad = int(is_wrong.argmax())
        raise ValueError(f"{name(bad)} has id {ids[bad]!r}; ids are integers from 0 to 2**63 - 1")
    return array
