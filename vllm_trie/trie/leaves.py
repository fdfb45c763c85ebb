"""The finished hypotheses of a trie as a table, for `trie/hypotheses.py` and `trie/traced.py`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Notes = tuple[np.ndarray, ...]  # what tokens carry: of each field [tokens, ...]


class TrieLeaves(NamedTuple):
    """Hypotheses that a last token ended, in the order in which they finished."""

    numbers: np.ndarray  # [k] int64, ascending
    parents: np.ndarray  # [k, 2] int64, length and row of the node before the last token
    tokens: np.ndarray  # [k] int32, the last ones
    scores: np.ndarray  # [k] float32, cumulative log-probabilities
    notes: Notes  # [k, ...], of the last tokens

    def at(self, numbers: np.ndarray) -> np.ndarray:
        """[n] int64: where the hypotheses of these numbers are.

        Raises:
            LookupError: one is not there.
        """
        places = np.searchsorted(self.numbers, numbers)
        if (self.numbers[places] != numbers).any():
            raise LookupError(f"no hypothesis {numbers[self.numbers[places] != numbers][0]}")
        return places

    def joined(self, later: TrieLeaves) -> TrieLeaves:
        """These and later ones."""
        if not len(self.numbers):
            return later
        return TrieLeaves(
            np.concatenate([self.numbers, later.numbers]),
            np.concatenate([self.parents, later.parents]),
            np.concatenate([self.tokens, later.tokens]),
            np.concatenate([self.scores, later.scores]),
            tuple(np.concatenate(fields) for fields in zip(self.notes, later.notes, strict=True)),
        )

    def without(self, numbers: np.ndarray) -> TrieLeaves:
        """The others, in arrays of their own: a view would hold what is reported of all."""
        stays = np.ones(len(self.numbers), np.bool_)
        stays[self.at(numbers)] = False
        notes = tuple(field[stays] for field in self.notes)
        return TrieLeaves(self.numbers[stays], self.parents[stays], self.tokens[stays], self.scores[stays], notes)


class TrieLeafEnds(NamedTuple):
    """Where hypotheses end, finished or not."""

    nodes: np.ndarray  # [n, 2] int64, length and row: of the newest token, or of the one before the last
    is_finished: np.ndarray  # [n] bool
    at: np.ndarray  # [finished] int64, where those that are finished are in their table

    @property
    def lengths(self) -> np.ndarray:
        """[n] int64: tokens of each."""
        return self.nodes[:, 0] + self.is_finished


NO_LEAVES = TrieLeaves(
    np.zeros(0, np.int64), np.zeros((0, 2), np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32), ()
)
