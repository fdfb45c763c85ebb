"""The hypothesis trie: the tokens of every live and finished hypothesis, common prefixes once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

ROOT = 0


class HypothesisTrie:
    """A trie of generated tokens. The prompt is the root and holds no token.

    A node is referenced by its children, by the row whose newest token it is, and by whoever keeps
    it (`finish`). What nothing references any more is reused at once, so memory follows the live
    hypotheses, not the steps. A node may carry a note: whatever its token's step wants to remember.
    """

    def __init__(self) -> None:
        self._parents = [ROOT]
        self._tokens = [-1]
        self._scores = [0.0]
        self._notes: list[Any] = [None]
        self._references = [1]  # the root is the first row
        self._unused: list[int] = []
        self._kept: set[int] = set()
        self.rows = [ROOT]

    @property
    def num_nodes(self) -> int:
        """Tokens held, the root not counted."""
        return len(self._parents) - len(self._unused) - 1

    def advance(
        self, parents: Sequence[int], tokens: Sequence[int], scores: Sequence[float], notes: Sequence[Any] | None = None
    ) -> None:
        """Replace the rows by their children.

        Args:
            parents: For each new row the present row it continues.
            tokens: Its new token.
            scores: Its cumulative log-probability.
            notes: What each new row carries.
        """
        old = self.rows
        of_rows = zip(parents, tokens, scores, notes or [None] * len(parents), strict=True)
        self.rows = [self._add(old[parent], token, score, note) for parent, token, score, note in of_rows]
        for node in old:
            self._release(node)

    def finish(self, row: int, token: int, score: float, note: Any = None) -> int:
        """Keep the hypothesis that `token` ends in `row`, until `drop`. Returns its node."""
        node = self._add(self.rows[row], token, score, note)
        self._kept.add(node)
        return node

    def drop(self, node: int) -> None:
        """Give up a kept hypothesis."""
        self._kept.remove(node)
        self._release(node)

    def tokens(self, node: int) -> list[int]:
        """The tokens from the root to `node`."""
        return [self._tokens[n] for n in self._path(node)]

    def token_logprobs(self, node: int) -> list[float]:
        """The log-probability of each of those tokens; their sum is the score of `node`."""
        scores = [0.0, *(self._scores[n] for n in self._path(node))]
        return [after - before for before, after in pairwise(scores)]

    def paths(self) -> list[list[int]]:
        """Of each row the nodes from the root to it: one per token, equal where histories are equal."""
        return [self._path(node) for node in self.rows]

    def row_scores(self) -> list[float]:
        """The cumulative log-probability of each row."""
        return [self._scores[node] for node in self.rows]

    def notes(self, node: int) -> list[Any]:
        """What each of those tokens carries."""
        return [self._notes[n] for n in self._path(node)]

    def check_invariants(self) -> None:
        """Raise AssertionError unless every reference is accounted for and nothing leaks."""
        expected = [0] * len(self._parents)
        unused = set(self._unused)
        assert len(unused) == len(self._unused), "a node was released twice"
        for node, parent in enumerate(self._parents):
            if node != ROOT and node not in unused:
                assert parent not in unused, f"node {node} outlived its parent {parent}"
                expected[parent] += 1
        for node in (*self.rows, *self._kept):
            assert node not in unused, f"row or kept node {node} was released"
            expected[node] += 1
        for node, (counted, held) in enumerate(zip(expected, self._references, strict=True)):
            assert node == ROOT or counted == held, f"node {node}: {held} references held, {counted} found"
            assert node == ROOT or node in unused or counted > 0, f"node {node} leaks"

    def _add(self, parent: int, token: int, score: float, note: Any) -> int:
        self._references[parent] += 1
        if self._unused:
            node = self._unused.pop()
            self._parents[node], self._tokens[node], self._scores[node] = parent, token, score
            self._references[node], self._notes[node] = 1, note
            return node
        self._parents.append(parent)
        self._tokens.append(token)
        self._scores.append(score)
        self._notes.append(note)
        self._references.append(1)
        return len(self._parents) - 1

    def _release(self, node: int) -> None:
        references = self._references
        references[node] -= 1
        while node != ROOT and not references[node]:
            self._unused.append(node)
            self._notes[node] = None
            node = self._parents[node]
            references[node] -= 1

    def _path(self, node: int) -> list[int]:
        path = []
        while node != ROOT:
            path.append(node)
            node = self._parents[node]
        return path[::-1]
