"""The hypothesis trie: the tokens of every live and finished hypothesis, common prefixes once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile
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
        self.rows = self._add([old[parent] for parent in parents], tokens, scores, notes)
        for node in old:
            self._release(node)

    def finish(
        self, rows: Sequence[int], tokens: Sequence[int], scores: Sequence[float], notes: Sequence[Any] | None = None
    ) -> list[int]:
        """Keep the hypotheses that `tokens` end in `rows`, until `drop`. Returns their nodes."""
        nodes = self._add([self.rows[row] for row in rows], tokens, scores, notes)
        self._kept.update(nodes)
        return nodes

    def keep_only(self, node: int) -> None:
        """Give up all kept hypotheses but one."""
        for other in self._kept - {node}:
            self.drop(other)

    def drop(self, node: int) -> None:
        """Give up a kept hypothesis."""
        self._kept.remove(node)
        self._release(node)

    def score(self, node: int) -> float:
        """The cumulative log-probability of the hypothesis that ends in `node`."""
        return self._scores[node]

    def token(self, node: int) -> int:
        """The token of `node`."""
        return self._tokens[node]

    def parent(self, node: int) -> int:
        """The node before `node`."""
        return self._parents[node]

    def deepest_common(self, start: int, dead: Collection[int] = ()) -> int:
        """The deepest node that every row and every kept hypothesis goes through, or ends in if it is the only one.

        Where that is `start` still, this costs nothing; else a walk from a row up to `start`. Where rows are left out,
        it is a walk from each of the others.

        Args:
            start: A node that all go through, as they do through the root.
            dead: Rows that do not count; not all.
        """
        if dead:
            ends = [*(node for row, node in enumerate(self.rows) if row not in dead), *self._kept]
            columns = zip(*(self._path(node, start) for node in ends), strict=False)
            common = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
            return common[-1] if common else start
        if self._references[start] > 1:
            return start
        deepest = start
        for node in self._path(self.rows[0], start):
            deepest = node
            if self._references[node] > 1:
                break
        return deepest

    def tokens(self, node: int, below: int = ROOT) -> list[int]:
        """The tokens from `below`, or the root, to `node`: its own is the last, that of `below` is left out."""
        return [self._tokens[n] for n in self._path(node, below)]

    def paths(self) -> list[list[int]]:
        """Of each row the nodes from the root to it: one per token, equal where histories are equal."""
        return [self._path(node) for node in self.rows]

    def row_scores(self) -> list[float]:
        """The cumulative log-probability of each row."""
        return [self._scores[node] for node in self.rows]

    def notes(self, node: int, below: int = ROOT) -> list[Any]:
        """What each of these tokens carries."""
        return [self._notes[n] for n in self._path(node, below)]

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

    def _add(
        self, parents: Sequence[int], tokens: Sequence[int], scores: Sequence[float], notes: Sequence[Any] | None
    ) -> list[int]:
        """Nodes below `parents`, unused ones as far as there are any."""
        count, notes = len(parents), notes or [None] * len(parents)
        assert count == len(tokens) == len(scores) == len(notes)
        nodes = [self._unused.pop() for _ in range(min(count, len(self._unused)))]
        for node, parent, token, score, note in zip(nodes, parents, tokens, scores, notes, strict=False):
            self._parents[node], self._tokens[node], self._scores[node] = parent, token, score
            self._references[node], self._notes[node] = 1, note
        first_new = len(nodes)
        nodes += range(len(self._parents), len(self._parents) + count - first_new)
        self._parents += parents[first_new:]
        self._tokens += tokens[first_new:]
        self._scores += scores[first_new:]
        self._notes += notes[first_new:]
        self._references += [1] * (count - first_new)
        for parent in parents:
            self._references[parent] += 1
        return nodes

    def _release(self, node: int) -> None:
        references = self._references
        references[node] -= 1
        while node != ROOT and not references[node]:
            self._unused.append(node)
            self._notes[node] = None
            node = self._parents[node]
            references[node] -= 1

    def _path(self, node: int, below: int = ROOT) -> list[int]:
        path = []
        while node != below:
            path.append(node)
            node = self._parents[node]
        return path[::-1]
