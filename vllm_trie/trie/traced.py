"""A hypothesis trie that remembers the whole search: what a request with `trace=True` gets back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm_trie.trie.hypotheses import HypothesisTrie

DIGITS = 5  # of scores, behind the point
NO_DRAFT = -1


class DraftedForest(NamedTuple):
    """The drafts of one forward, and which of them became beams."""

    parents: list[int]  # by draft: the draft before it, or -1 - row of the beam that it continues
    tokens: list[int]  # by draft
    accepted: list[list[int]]  # by step, those of the forward but the last; by row: its draft, or -1


class TracedTrie(HypothesisTrie):
    """See `HypothesisTrie`. A step is one `advance`, or in the end a `finish` alone."""

    def __init__(self) -> None:
        super().__init__()
        self._beams = list[tuple[Sequence[int], Sequence[int], Sequence[float]]]()  # parents, tokens, scores by step
        self._finished = list[tuple[int, int, int, float]]()  # step, parent, token, score
        self._numbers: dict[int, int] = {}  # by node: of these the one that ended in it last
        self._forests = list[dict[str, Any]]()
        self._accepted: dict[int, list[int]] = {}  # by step
        self._blocks: dict[int, tuple[int, int]] = {}  # by step

    def advance(
        self, parents: Sequence[int], tokens: Sequence[int], scores: Sequence[float], notes: Sequence[Any] | None = None
    ) -> None:
        super().advance(parents, tokens, scores, notes)
        self._beams.append((parents, tokens, scores))

    def finish(
        self, rows: Sequence[int], tokens: Sequence[int], scores: Sequence[float], notes: Sequence[Any] | None = None
    ) -> list[int]:
        nodes = super().finish(rows, tokens, scores, notes)
        numbers = range(len(self._finished), len(self._finished) + len(nodes))
        self._numbers.update(zip(nodes, numbers, strict=True))
        self._finished += zip([len(self._beams)] * len(nodes), rows, tokens, scores, strict=True)
        return nodes

    def end(self, rows: Sequence[int]) -> None:
        """The search goes on no more: beams in these rows are hypotheses that ended in the newest step."""
        for row in rows:
            parents, tokens, scores = self._beams[-1]
            self._numbers[self.rows[row]] = len(self._finished)
            self._finished.append((len(self._beams) - 1, parents[row], tokens[row], scores[row]))

    def add_forest(self, forest: DraftedForest) -> None:
        """The next steps are those of one forward, which verified this forest."""
        step = len(self._beams)
        self._forests.append({"step": step, "parents": forest.parents, "tokens": forest.tokens})
        self._accepted.update(enumerate(forest.accepted, start=step))

    def add_blocks(self, num_held: int, num_shared: int) -> None:
        """After the newest step all beams together hold so many KV blocks, and share so many, the first ones."""
        self._blocks[len(self._beams) - 1] = num_held, num_shared

    def as_dict(self, returned: Sequence[int]) -> dict[str, Any]:
        """The search as lists; see `vllm_trie.trace.Trace`.

        Args:
            returned: The nodes of the hypotheses that are returned, best first.
        """
        steps = range(len(self._beams))
        ended = [[*column] for column in zip(*self._finished, strict=True)] or [[], [], [], []]
        return {
            "parents": [[*parents] for parents, _, _ in self._beams],
            "tokens": [[*tokens] for _, tokens, _ in self._beams],
            "scores": [_rounded(scores) for _, _, scores in self._beams],
            "finished": {"steps": ended[0], "parents": ended[1], "tokens": ended[2], "scores": _rounded(ended[3])},
            "returned": [self._numbers[node] for node in returned],
            "forests": self._forests,
            "accepted": [self._accepted.get(step, []) for step in steps],
            "blocks": [self._blocks.get(step) for step in steps],
        }


def _rounded(scores: Sequence[float]) -> list[float | None]:
    """As JSON has them; None where there is no beam."""
    return [round(score, DIGITS) if math.isfinite(score) else None for score in scores]
