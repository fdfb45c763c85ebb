"""The hypothesis trie: the tokens of all running and finished hypotheses, as backpointers by step."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from vllm_trie.trie import num_equal_trie_columns
from vllm_trie.trie.leaves import NO_LEAVES, Notes, TrieLeafEnds, TrieLeaves

NO_ROW = -1
NBYTES = attrgetter("nbytes")
SPARE_BYTES = 1 << 24  # steps are pruned once they take this much more than twice what was needed


class Node(NamedTuple):
    """The token that a step added to a row, or the prompt."""

    length: int  # generated tokens up to and including this one
    row: int


ROOT = Node(0, 0)


class _TrieStep(NamedTuple):
    """One step: the new rows."""

    parents: np.ndarray  # [b] int32, rows of the step before
    tokens: np.ndarray  # [b] int32
    scores: np.ndarray  # [b] float32
    notes: Notes  # [b, ...]

    @property
    def num_bytes(self) -> int:
        return sum(map(NBYTES, (*self[:3], *self.notes)))

    def some(self, rows: np.ndarray) -> _TrieStep:
        """The step restricted to some rows."""
        of_notes = tuple(field[rows] for field in self.notes)
        return _TrieStep(self.parents[rows], self.tokens[rows], self.scores[rows], of_notes)


class _Origins(NamedTuple):
    """For each row of a step, its ancestor one token after what is known to be common."""

    start: int  # tokens known to be common
    length: int  # of the step
    rows: np.ndarray  # [b]


NO_ORIGINS = _Origins(-1, 0, np.zeros(1, np.int32))


class HypothesisTrie:
    """A trie of generated tokens. The prompt is the root and holds no token.

    A step is a layer of nodes: for each row its parent row and its token. So a step costs a few arrays, however many
    beams there are, and histories are walked back on demand. Leaves are numbered: finished hypotheses 0, 1, 2 and so on
    in the order in which they finish, and the newest token of row r is ~r. There are no reference counts. If steps take
    much memory, nodes without descendants are pruned from time to time. Tokens may carry notes: any data per token.
    """

    def __init__(self) -> None:
        self._steps = list[_TrieStep]()
        self._finished = NO_LEAVES
        self._num_finished = 0  # so far, including dropped ones
        self._num_bytes, self._most_bytes = 0, SPARE_BYTES  # of steps; and the limit at which they are pruned
        self._origins = NO_ORIGINS
        self._origin_of = ROOT, -1, NO_ROW  # a cache for one node: the node, `start`, and its ancestor

    @property
    def length(self) -> int:
        """Steps so far."""
        return len(self._steps)

    @property
    def width(self) -> int:
        """Rows after the newest step."""
        return len(self._steps[-1].tokens) if self._steps else 1

    @property
    def num_nodes(self) -> int:
        """Tokens in the trie."""
        return sum(len(step.tokens) for step in self._steps) + len(self._finished.numbers)

    def advance(self, parents: np.ndarray, tokens: np.ndarray, scores: np.ndarray, notes: Notes = ()) -> None:
        """Replace the rows by their children.

        Args:
            parents: [b] for each new row, the present row that it continues.
            tokens: [b] its new token.
            scores: [b] its cumulative log-probability, in float32.
            notes: Of the new tokens; in every step fields of the same shape except for b.
        """
        step = _TrieStep(np.array(parents, np.int32), np.array(tokens, np.int32), np.array(scores, np.float32), notes)
        self._steps.append(step)
        self._num_bytes += step.num_bytes
        if self._num_bytes > self._most_bytes:
            self._prune()
            self._most_bytes = 2 * self._num_bytes + SPARE_BYTES

    def finish(self, rows: ArrayLike, tokens: ArrayLike, scores: ArrayLike, notes: Notes = ()) -> np.ndarray:
        """Add the finished hypotheses in which `tokens` end `rows`. Returns their numbers, [n] int64.

        Args:
            rows, tokens, scores, notes: As for `advance`, for each hypothesis.
        """
        parents = self._nodes(np.array(rows, np.int64))
        numbers = np.arange(self._num_finished, self._num_finished + len(parents))
        ended = TrieLeaves(numbers, parents, np.array(tokens, np.int32), np.array(scores, np.float32), notes)
        self._finished = self._finished.joined(ended)
        self._num_finished += len(parents)
        return numbers

    def drop(self, leaves: ArrayLike) -> None:
        """Remove finished hypotheses."""
        self._finished = self._finished.without(np.array(leaves, np.int64))

    def parent(self, leaf: int) -> Node:
        """The node before the last token of a finished hypothesis."""
        return Node(*self._finished.parents[self._finished.at(np.array([leaf]))[0]].tolist())

    def scores(self, leaves: ArrayLike) -> np.ndarray:
        """[n] float32, the cumulative log-probability of each of these hypotheses."""
        ends = self._ends(leaves)
        scores = self.row_scores()[np.where(ends.is_finished, 0, ends.nodes[:, 1])]
        scores[ends.is_finished] = self._finished.scores[ends.at]
        return scores

    def score_at(self, node: Node) -> float:
        """The cumulative log-probability of the tokens up to a node."""
        return self._steps[node.length - 1].scores[node.row].item() if node.length else 0.0

    def row_scores(self) -> np.ndarray:
        """[b] the cumulative log-probability of each row."""
        return self._steps[-1].scores if self._steps else np.zeros(1, np.float32)

    def row_tokens(self) -> np.ndarray:
        """[b] the newest token of each row; there must be one."""
        return self._steps[-1].tokens

    def tokens(self, leaves: ArrayLike) -> list[list[int]]:
        """All tokens of each of these hypotheses."""
        ends = self._ends(leaves)
        before, lengths = self._tokens(ends.nodes), ends.lengths
        found = np.column_stack([before, np.zeros(len(lengths), np.int32)])
        found[ends.is_finished, lengths[ends.is_finished] - 1] = self._finished.tokens[ends.at]
        return [history[:length] for history, length in zip(found.tolist(), lengths.tolist(), strict=True)]

    def histories(self) -> np.ndarray:
        """[b, length] int32: the tokens of each row."""
        return self._tokens(self._nodes(np.arange(self.width)))

    def notes(self, leaves: ArrayLike) -> Notes:
        """The notes of the tokens of these hypotheses, concatenated: for each field [tokens, ...]."""
        ends = self._ends(leaves)
        stops = ends.lengths.cumsum()
        found = self._notes(ends.nodes, 0, stops - ends.lengths, int(ends.lengths.sum()))
        for field, of_last in zip(found, self._finished.notes, strict=False):  # no fields if none has finished
            field[stops[ends.is_finished] - 1] = of_last[ends.at]
        return found

    def tokens_between(self, start: int, node: Node) -> list[int]:
        """The tokens up to a node, without the first `start`."""
        return self._tokens(np.array([node]), start)[0].tolist()

    def notes_between(self, start: int, node: Node) -> Notes:
        """The notes of the tokens up to a node, without the first `start`."""
        return self._notes(np.array([node]), start, np.zeros(1, np.int64), node.length - start)

    def ancestors(self, start: int = 0) -> np.ndarray:
        """[b, length - start] int32: the rows through which each row's history went after its first `start` tokens.

        If two rows are equal in a column, their histories are equal up to that token.
        """
        return self._ancestors(self._nodes(np.arange(self.width)), start)

    def deepest_common(self, start: int, rows: np.ndarray, finished: int | None = None) -> Node | None:
        """The deepest common ancestor of these rows and of a finished hypothesis's last token; a node may be its own.

        If no more is common than before, this costs one gather, however many tokens follow `start`.

        Args:
            start: Tokens that are known to be common.
            rows: [n], at least one.
            finished: The number of the hypothesis, if any.

        Returns:
            A node with more than `start` tokens; None if there is none.
        """
        if self.length <= start or ((origins := self._origins_of_rows(start)[rows]) != origins[0]).any():
            return None
        nodes = self._nodes(rows)
        if finished is not None:
            parent = self.parent(finished)
            if self._origin_of_node(parent, start) != origins[0]:
                return None
            nodes = np.vstack([nodes, parent])
        ancestors = self._ancestors(nodes, start)
        num_common = num_equal_trie_columns(ancestors)
        return Node(start + num_common, int(ancestors[0, num_common - 1]))

    def _origins_of_rows(self, start: int) -> np.ndarray:
        """[b] the ancestor of each row with `start + 1` tokens, from the last result if that had the same `start`."""
        start_before, known_length, known = self._origins
        is_known, rows = start_before == start, np.arange(self.width)
        for length in range(self.length, known_length if is_known else start + 1, -1):
            rows = self._steps[length - 1].parents[rows]
        self._origins = _Origins(start, self.length, known[rows] if is_known else rows)
        return self._origins.rows

    def _origin_of_node(self, node: Node, start: int) -> int:
        """The ancestor of one node with `start + 1` tokens; `NO_ROW` if the node is shorter."""
        if self._origin_of[:2] != (node, start):
            rows = self._ancestors(np.array([node]), start)[0]
            self._origin_of = node, start, int(rows[0]) if len(rows) else NO_ROW
        return self._origin_of[2]

    def _nodes(self, rows: np.ndarray) -> np.ndarray:
        """[n, 2] int64: the length and the row of the newest token of each of these rows."""
        return np.column_stack([np.full(len(rows), self.length), rows])

    def _ends(self, leaves: ArrayLike) -> TrieLeafEnds:
        """The ends of these hypotheses.

        Raises:
            LookupError: one was dropped, or never finished.
        """
        numbers = np.array(leaves, np.int64)
        nodes, is_finished = self._nodes(~numbers), numbers >= 0
        at = self._finished.at(numbers[is_finished])
        nodes[is_finished] = self._finished.parents[at]
        return TrieLeafEnds(nodes, is_finished, at)

    def _ancestors(self, nodes: np.ndarray, start: int) -> np.ndarray:
        """[n, longest - start] int32 rows, from the first token after `start` to each node; `NO_ROW` beyond."""
        return self._walk_back(nodes, start)

    def _tokens(self, nodes: np.ndarray, start: int = 0) -> np.ndarray:
        """[n, longest - start] int32 tokens, from the first one after `start` to each node; undefined beyond."""
        return self._walk_back(nodes, start, reads_tokens=True)

    def _walk_back(self, nodes: np.ndarray, start: int, reads_tokens: bool = False) -> np.ndarray:
        """[n, longest - start] int32: the rows on the way to each node, or their tokens."""
        lengths, rows = nodes.T
        order = np.argsort(-lengths, kind="stable")  # longest first, so that those of at least some length lead
        longest, rows = max(int(lengths.max(initial=0)), start), rows[order]
        counts = np.searchsorted(-lengths[order], -np.arange(longest + 1), side="right").tolist()
        found = np.full((longest - start, len(nodes)), NO_ROW, np.int32)
        for length in range(longest, start, -1):
            step, at = self._steps[length - 1], rows[: counts[length]]
            found[length - start - 1, : len(at)] = step.tokens[at] if reads_tokens else at
            at[:] = step.parents[at]
        in_order = np.empty(found.T.shape, np.int32)
        in_order[order] = found.T
        return in_order

    def _notes(self, nodes: np.ndarray, start: int, places: np.ndarray, count: int) -> Notes:
        """For each field [count, ...]: the notes of the tokens on the way to nodes; undefined in other places.

        Args:
            nodes: [n, 2].
            start: The number of first tokens of each that are left out.
            places: [n] the place of the first token of each; the others follow it.
            count: Number of places.
        """
        like = self._steps[0].notes if self._steps else self._finished.notes
        found = tuple(np.empty((count, *field.shape[1:]), field.dtype) for field in like)
        for step, rows in zip(self._steps[start:], self._ancestors(nodes, start).T, strict=False):
            leads_on = rows != NO_ROW
            for field, of_rows in zip(found, step.notes, strict=True):
                field[places[leads_on]] = of_rows[rows[leads_on]]
            places = places + 1
        return found

    def _prune(self) -> None:
        """Remove nodes without running or finished descendants. The others are renumbered within their steps."""
        lengths, rows = self._finished.parents.T  # views: rows are renumbered in place
        leads_on = np.ones(self.width, np.bool_)
        for length in range(self.length, 0, -1):
            ends_here = lengths == length
            leads_on[rows[ends_here]] = True
            kept, numbers = np.flatnonzero(leads_on), np.cumsum(leads_on, dtype=np.int32) - 1
            rows[ends_here] = numbers[rows[ends_here]]
            if length < self.length:
                following = self._steps[length]
                self._steps[length] = following._replace(parents=numbers[following.parents])
            self._steps[length - 1] = step = self._steps[length - 1].some(kept)
            leads_on = np.zeros(len(self._steps[length - 2].tokens) if length > 1 else 1, np.bool_)
            leads_on[step.parents] = True
        self._num_bytes = sum(step.num_bytes for step in self._steps)
        self._origins, self._origin_of = NO_ORIGINS, (ROOT, -1, NO_ROW)

    def check_invariants(self) -> None:
        """Raise AssertionError unless all ancestors of rows and finished hypotheses exist."""
        width = 1
        for length, step in enumerate(self._steps, 1):
            sizes = {len(field) for field in (*step[:3], *step.notes)}
            assert len(sizes) == 1, f"step {length} has fields of {sizes} rows"
            inside = (step.parents >= 0) & (step.parents < width)
            assert inside.all(), f"step {length} continues rows of which there are {width}"
            width = len(step.tokens)
        widths = [1, *(len(step.tokens) for step in self._steps)]
        for leaf, (length, row) in zip(self._finished.numbers.tolist(), self._finished.parents.tolist(), strict=True):
            assert 0 <= leaf < self._num_finished, f"hypothesis {leaf} of {self._num_finished}"
            assert 0 <= length <= self.length, f"hypothesis {leaf} is longer than the search"
            assert 0 <= row < widths[length], f"hypothesis {leaf} continues row {row} of {widths[length]}"
        assert self._num_bytes == sum(step.num_bytes for step in self._steps), "bytes are counted wrong"
