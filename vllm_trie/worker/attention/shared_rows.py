"""Which rows of a batch share their first KV blocks: what attention must know of a step's groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class SharedRows(NamedTuple):
    """Rows of one group, in a batch, whose first tokens lie in the same KV blocks."""

    places: np.ndarray  # [rows] int64
    num_shared: int  # tokens; whole blocks


class SharesPrefixes(ABC):
    """A builder of attention metadata for layers that may make use of such rows."""

    can_share = False  # whether these layers do
    groups: Sequence[SharedRows] = ()  # of the next batch that it sees, such as it takes; it takes them out

    @abstractmethod
    def takes(self, num_rows: int, num_shared: int) -> bool:
        """Whether it reads what so many rows share once, if that is so many tokens."""


class SharedTokens(NamedTuple):
    """The tokens that such rows compute, one group after the other; N of them in G groups."""

    places: np.ndarray  # [N] int32, of each token in the batch
    rows: np.ndarray  # [N] int32, of each token's row in the batch
    lengths: np.ndarray  # [N] int32, keys that each token sees
    starts: np.ndarray  # [G + 1] int32, where each group's tokens begin
    num_shared: np.ndarray  # [G] int32, keys that all rows of a group share


def tokens_of(
    groups: Sequence[SharedRows], query_starts: np.ndarray, lengths: np.ndarray, block_size: int
) -> SharedTokens:
    """Lay out what the rows of groups compute.

    Args:
        groups: One or more.
        query_starts: [rows + 1] of the batch, where each row's tokens begin.
        lengths: [rows], keys of each row, those of this step included.
        block_size: Of what is read. A token must not see less than is shared.
    """
    rows = np.concatenate([group.places for group in groups])
    counts = np.diff(query_starts)[rows]
    row_of_token = np.repeat(rows, counts)
    starts_of_rows = counts.cumsum() - counts
    within = np.arange(len(row_of_token)) - np.repeat(starts_of_rows, counts)
    seen = np.repeat(lengths[rows] - counts, counts) + within + 1
    first_rows = np.cumsum([0, *(len(group.places) for group in groups)])
    starts = np.append(starts_of_rows, len(row_of_token))[first_rows]
    num_shared = np.minimum([group.num_shared for group in groups], np.minimum.reduceat(seen, starts[:-1]))
    num_shared = num_shared // block_size * block_size
    return SharedTokens(
        *((query_starts[row_of_token] + within).astype(np.int32), row_of_token.astype(np.int32)),
        *(seen.astype(np.int32), starts.astype(np.int32), num_shared.astype(np.int32)),
    )
