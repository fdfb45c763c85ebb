"""The finished hypotheses of a trie as a table, for `trie/hypotheses.py` and `trie/traced.py`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Notes = tuple[np.ndarray, ...]  # data per token: for each field [tokens, ...]


class TrieLeaves(NamedTuple):
    """Finished hypotheses, in the order in which they finished."""

    numbers: np.ndarray  # [k] int64, ascending
    parents: np.ndarray  # [k, 2] int64, length and row of the node before the last token
    tokens: np.ndarray  # [k] int32, the last tokens
    scores: np.ndarray  # [k] float32, cumulative log-probabilities
    notes: Notes  # [k, ...], of the last tokens

    def at(self, numbers: np.ndarray) -> np.ndarray:
        """[n] int64, the places of the hypotheses with these numbers.

        Raises:
            LookupError: there is none with such a number.
        """
        places = np.searchsorted(self.numbers, numbers)
        if (self.numbers[places] != numbers).any():
            raise LookupError(f"no hypothesis {numbers[self.numbers[places] != numbers][0]}")
        return places

    def joined(self, later: TrieLeaves) -> TrieLeaves:
        """These hypotheses and later ones."""
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
        """All hypotheses but these, copied: views would keep the notes of all alive."""
        stays = np.ones(len(self.numbers), np.bool_)
        stays[self.at(numbers)] = False
        notes = tuple(field[stays] for field in self.notes)
        return TrieLeaves(self.numbers[stays], self.parents[stays], self.tokens[stays], self.scores[stays], notes)


class TrieLeafEnds(NamedTuple):
    """The ends of hypotheses, finished or running."""

    nodes: np.ndarray  # [n, 2] int64, length and row: of the newest token, or if finished of the one before the last
    is_finished: np.ndarray  # [n] bool
    at: np.ndarray  # [finished] int64, the places of finished ones in `TrieLeaves`

    @property
    def lengths(self) -> np.ndarray:
        """[n] int64, the tokens of each."""
        return self.nodes[:, 0] + self.is_finished


NO_LEAVES = TrieLeaves(
    np.zeros(0, np.int64), np.zeros((0, 2), np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32), ()
)
