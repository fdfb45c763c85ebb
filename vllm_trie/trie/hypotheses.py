"""The hypothesis trie: the tokens of every live and finished hypothesis, as backpointers by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vllm_trie.trie.tables import num_equal

Notes = tuple[np.ndarray, ...]  # what tokens carry: of each field [tokens, ...]

NO_ROW = -1
SPARE_BYTES = 1 << 24  # that steps may take beyond twice of what is needed, before they are looked through


class Node(NamedTuple):
    """The token that a step added to a row, or the prompt."""

    length: int  # tokens from the prompt to here, this one included
    row: int


ROOT = Node(0, 0)


class _Step(NamedTuple):
    """What one step made of the rows."""

    parents: np.ndarray  # [b] int32, rows of the step before
    tokens: np.ndarray  # [b] int32
    scores: np.ndarray  # [b] float32
    notes: Notes  # [b, ...]

    @property
    def num_bytes(self) -> int:
        return sum(field.nbytes for field in (*self[:3], *self.notes))

    def some(self, rows: np.ndarray) -> _Step:
        """Of these rows."""
        of_notes = tuple(field[rows] for field in self.notes)
        return _Step(self.parents[rows], self.tokens[rows], self.scores[rows], of_notes)


class Leaf(NamedTuple):
    """A hypothesis that a last token ended."""

    parent: Node
    token: int
    score: float
    notes: Notes  # [...], of this token


class _Origins(NamedTuple):
    """Of each row of a step its ancestor, one token beyond what is known to be common."""

    start: int  # tokens known to be common
    length: int  # of the step
    rows: np.ndarray  # [b]


NO_ORIGINS = _Origins(-1, 0, np.zeros(1, np.int32))


class HypothesisTrie:
    """A trie of generated tokens. The prompt is the root and holds no token.

    A step is a layer of nodes: of each row the row that it continues, and its token. So a step costs a few arrays,
    however many beams there are, and a history is walked back when it is asked for. A leaf is known by a number: a
    finished hypothesis by 0, 1, 2 and so on, in the order in which they finished, and the newest token of row r by ~r.
    Nothing is counted by reference. Where steps take much memory, nodes that lead nowhere are left out from time to
    time. Tokens may carry notes: whatever their step wants to remember.
    """

    def __init__(self) -> None:
        self._steps = list[_Step]()
        self._finished: dict[int, Leaf] = {}
        self._num_finished = 0  # ever
        self._num_bytes, self._most_bytes = 0, SPARE_BYTES  # of steps; and when they are looked through
        self._origins = NO_ORIGINS
        self._origin_of = ROOT, -1, NO_ROW  # likewise of one node: that, `start`, and its ancestor

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
        """Tokens held, the root not counted."""
        return sum(len(step.tokens) for step in self._steps) + len(self._finished)

    def advance(self, parents: np.ndarray, tokens: np.ndarray, scores: np.ndarray, notes: Notes = ()) -> None:
        """Replace the rows by their children.

        Args:
            parents: [b] for each new row the present row it continues.
            tokens: [b] its new token.
            scores: [b] its cumulative log-probability, in float32.
            notes: What the new tokens carry; in every step fields of the same shape, but for b.
        """
        step = _Step(np.array(parents, np.int32), np.array(tokens, np.int32), np.array(scores, np.float32), notes)
        self._steps.append(step)
        self._num_bytes += step.num_bytes
        if self._num_bytes > self._most_bytes:
            self._prune()
            self._most_bytes = 2 * self._num_bytes + SPARE_BYTES

    def finish(
        self, rows: Sequence[int], tokens: Sequence[int], scores: Sequence[float], notes: Notes = ()
    ) -> list[int]:
        """Keep the hypotheses that `tokens` end in `rows`, until `drop`. Returns their numbers."""
        # Copies: a view of one row would keep what is reported of all.
        of_each = (tuple(map(np.copy, one)) for one in zip(*notes, strict=True)) if notes else [()] * len(rows)
        leaves = [*range(self._num_finished, self._num_finished + len(rows))]
        parents = (Node(self.length, row) for row in rows)
        self._finished.update(zip(leaves, map(Leaf, parents, tokens, scores, of_each), strict=True))
        self._num_finished += len(rows)
        return leaves

    def drop(self, leaf: int) -> None:
        """Give up a finished hypothesis."""
        del self._finished[leaf]

    def parent(self, leaf: int) -> Node:
        """The node before the last token of a finished hypothesis."""
        return self._finished[leaf].parent

    def score(self, leaf: int) -> float:
        """The cumulative log-probability of a hypothesis."""
        return self._finished[leaf].score if leaf >= 0 else self.score_at(Node(self.length, ~leaf))

    def score_at(self, node: Node) -> float:
        """The cumulative log-probability of the tokens that lead to a node."""
        return self._steps[node.length - 1].scores[node.row].item() if node.length else 0.0

    def row_scores(self) -> np.ndarray:
        """[b] the cumulative log-probability of each row."""
        return self._steps[-1].scores if self._steps else np.zeros(1, np.float32)

    def row_tokens(self) -> np.ndarray:
        """[b] the newest token of each row; there must be one."""
        return self._steps[-1].tokens

    def tokens(self, leaves: Sequence[int]) -> list[list[int]]:
        """All tokens of each of these hypotheses."""
        nodes = [self._node(leaf) for leaf in leaves]
        histories = [row[: node.length] for row, node in zip(self._tokens(nodes).tolist(), nodes, strict=True)]
        for history, leaf in zip(histories, leaves, strict=True):
            if leaf >= 0:
                history.append(self._finished[leaf].token)
        return histories

    def histories(self) -> np.ndarray:
        """[b, length] int32: the tokens of each row."""
        return self._tokens([Node(self.length, row) for row in range(self.width)])

    def notes(self, leaf: int) -> Notes:
        """What the tokens of a hypothesis carry: of each field [tokens, ...]."""
        of_tokens = self._notes(self._node(leaf), 0)
        return _stacked([*of_tokens, self._finished[leaf].notes] if leaf >= 0 else of_tokens)

    def tokens_between(self, start: int, node: Node) -> list[int]:
        """The tokens that lead to a node without the first `start` of them."""
        return self._tokens([node], start)[0].tolist()

    def notes_between(self, start: int, node: Node) -> Notes:
        """What these tokens, of which there is one at least, carry."""
        return _stacked(self._notes(node, start))

    def ancestors(self, start: int = 0) -> np.ndarray:
        """[b, length - start] int32: through which rows each row's history went after its first `start` tokens.

        Where two rows have the same in a column, their histories are the same up to that token.
        """
        return self._ancestors([Node(self.length, row) for row in range(self.width)], start)

    def deepest_common(self, start: int, rows: np.ndarray, finished: int | None = None) -> Node | None:
        """The deepest node that these rows, and the last token of a finished hypothesis, descend from or are.

        Where no more is common than before, this costs a gather, however long ago that was.

        Args:
            start: Tokens that are known to be common.
            rows: [n], one at least.
            finished: Its number.

        Returns:
            A node of more than `start` tokens; None if there is none.
        """
        nodes = [Node(self.length, row) for row in rows.tolist()] if self.length > start else []
        if not nodes or ((origins := self._origins_of_rows(start)[rows]) != origins[0]).any():
            return None
        if finished is not None:
            nodes.append(self.parent(finished))
            if self._origin_of_node(nodes[-1], start) != origins[0]:
                return None
        ancestors = self._ancestors(nodes, start)
        num_common = num_equal(ancestors)
        return Node(start + num_common, int(ancestors[0, num_common - 1]))

    def _origins_of_rows(self, start: int) -> np.ndarray:
        """[b] of each row its ancestor of `start + 1` tokens: by what was looked up last, if that was for as many."""
        start_before, known_length, known = self._origins
        is_known, rows = start_before == start, np.arange(self.width)
        for length in range(self.length, known_length if is_known else start + 1, -1):
            rows = self._steps[length - 1].parents[rows]
        self._origins = _Origins(start, self.length, known[rows] if is_known else rows)
        return self._origins.rows

    def _origin_of_node(self, node: Node, start: int) -> int:
        """The same of one node; `NO_ROW` if it is shorter."""
        if self._origin_of[:2] != (node, start):
            rows = self._ancestors([node], start)[0]
            self._origin_of = node, start, int(rows[0]) if len(rows) else NO_ROW
        return self._origin_of[2]

    def _node(self, leaf: int) -> Node:
        """What a row ends in, or the last token of a finished hypothesis follows."""
        return self._finished[leaf].parent if leaf >= 0 else Node(self.length, ~leaf)

    def _ancestors(self, nodes: Sequence[Node], start: int) -> np.ndarray:
        """[n, longest - start] int32 rows, from the first token after `start` to each node; `NO_ROW` beyond."""
        return self._walk_back(nodes, start, lambda step, rows: rows)

    def _tokens(self, nodes: Sequence[Node], start: int = 0) -> np.ndarray:
        """[n, longest - start] int32 tokens, from the first one after `start` to each node; anything beyond."""
        return self._walk_back(nodes, start, lambda step, rows: step.tokens[rows])

    def _walk_back(
        self, nodes: Sequence[Node], start: int, read: Callable[[_Step, np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """[n, longest - start] int32: from each node on back, what is read in the rows that lead to it."""
        lengths, rows = np.array(nodes, np.int64).reshape(-1, 2).T
        order = np.argsort(-lengths, kind="stable")  # the longest first, so that those of a length are the first ones
        longest, rows = max(int(lengths.max(initial=0)), start), rows[order]
        counts = np.searchsorted(-lengths[order], -np.arange(longest + 1), side="right").tolist()
        found = np.full((longest - start, len(nodes)), NO_ROW, np.int32)
        for length in range(longest, start, -1):
            step, at = self._steps[length - 1], rows[: counts[length]]
            found[length - start - 1, : len(at)] = read(step, at)
            at[:] = step.parents[at]
        in_order = np.empty(found.T.shape, np.int32)
        in_order[order] = found.T
        return in_order

    def _notes(self, node: Node, start: int) -> list[Notes]:
        """What tokens carry, one by one."""
        rows = self._ancestors([node], start)[0]
        steps = self._steps[start : node.length]
        return [tuple(field[row] for field in step.notes) for step, row in zip(steps, rows, strict=True)]

    def _prune(self) -> None:
        """Leave out nodes from which nothing descends that lives, or has finished. The others get other rows."""
        ends = dict[int, list[int]]()  # by length: numbers of what goes on from there
        for leaf, finished in self._finished.items():
            ends.setdefault(finished.parent.length, []).append(leaf)
        leads_on = np.ones(self.width, np.bool_)
        for length in range(self.length, 0, -1):
            leaves = ends.get(length, [])
            leads_on[[self._finished[leaf].parent.row for leaf in leaves]] = True
            kept, numbers = np.flatnonzero(leads_on), np.cumsum(leads_on, dtype=np.int32) - 1
            for leaf in leaves:
                node = Node(length, int(numbers[self._finished[leaf].parent.row]))
                self._finished[leaf] = self._finished[leaf]._replace(parent=node)
            if length < self.length:
                following = self._steps[length]
                self._steps[length] = following._replace(parents=numbers[following.parents])
            self._steps[length - 1] = step = self._steps[length - 1].some(kept)
            leads_on = np.zeros(len(self._steps[length - 2].tokens) if length > 1 else 1, np.bool_)
            leads_on[step.parents] = True
        self._num_bytes = sum(step.num_bytes for step in self._steps)
        self._origins, self._origin_of = NO_ORIGINS, (ROOT, -1, NO_ROW)

    def check_invariants(self) -> None:
        """Raise AssertionError unless all that a row or a finished hypothesis goes through is there."""
        width = 1
        for length, step in enumerate(self._steps, 1):
            sizes = {len(field) for field in (*step[:3], *step.notes)}
            assert len(sizes) == 1, f"step {length} has fields of {sizes} rows"
            inside = (step.parents >= 0) & (step.parents < width)
            assert inside.all(), f"step {length} continues rows of which there are {width}"
            width = len(step.tokens)
        widths = [1, *(len(step.tokens) for step in self._steps)]
        for leaf, finished in self._finished.items():
            assert 0 <= leaf < self._num_finished, f"hypothesis {leaf} of {self._num_finished}"
            length, row = finished.parent
            assert 0 <= length <= self.length, f"hypothesis {leaf} is longer than the search"
            assert 0 <= row < widths[length], f"hypothesis {leaf} continues row {row} of {widths[length]}"
        assert self._num_bytes == sum(step.num_bytes for step in self._steps), "bytes are counted wrong"


def _stacked(notes: Sequence[Notes]) -> Notes:
    return tuple(np.stack(field) for field in zip(*notes, strict=True))
