"""A hypothesis trie that keeps the whole search, for requests with `trace=True`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from vllm_trie.trie.hypotheses import HypothesisTrie
from vllm_trie.trie.leaves import TrieLeaves

DIGITS = 5  # decimals of scores
NO_DRAFT = -1


class DraftedForest(NamedTuple):
    """The drafts of one forward pass, and which of them became beams."""

    parents: list[int]  # of each draft: the draft, or -1 - row of the beam, that it continues
    tokens: list[int]  # of each draft
    accepted: list[list[int]]  # for each step of the forward pass but the last, by row: its draft, or -1


class TracedTrie(HypothesisTrie):
    """A `HypothesisTrie` that removes nothing. A step is one `advance`, or at the end only a `finish`."""

    def __init__(self) -> None:
        super().__init__()
        self._forests = list[dict[str, Any]]()
        self._accepted: dict[int, list[int]] = {}  # by step
        self._blocks: dict[int, tuple[int, int]] = {}  # by step

    def drop(self, leaves: ArrayLike) -> None:
        """Keep hypotheses that were beaten: they are part of the search."""

    def _prune(self) -> None:
        """Keep nodes without descendants, too."""

    def end(self, row: int) -> int:
        """After the search, record a beam as a hypothesis that ended in the newest step. Returns its number."""
        step = self._steps[-1].some(np.array([row]))
        numbers, parents = np.array([self._num_finished]), np.array([[self.length - 1, *step.parents]])
        self._finished = self._finished.joined(TrieLeaves(numbers, parents, step.tokens, step.scores, step.notes))
        self._num_finished += 1
        return int(numbers[0])

    def add_forest(self, forest: DraftedForest) -> None:
        """Record the forest of a forward pass, whose steps come next."""
        self._forests.append({"step": self.length, "parents": forest.parents, "tokens": forest.tokens})
        self._accepted.update(enumerate(forest.accepted, start=self.length))

    def add_blocks(self, num_held: int, num_shared: int) -> None:
        """Record how many KV blocks all beams hold after the newest step, and how many leading ones all share."""
        self._blocks[self.length - 1] = num_held, num_shared

    def as_dict(self, returned: Sequence[int]) -> dict[str, Any]:
        """The search as lists; see `vllm_trie.trace.Trace`.

        Args:
            returned: The numbers of the hypotheses that are returned, best first.
        """
        steps, ended = range(self.length), self._finished
        return {
            "parents": [step.parents.tolist() for step in self._steps],
            "tokens": [step.tokens.tolist() for step in self._steps],
            "scores": [_rounded_trie_scores(step.scores.tolist()) for step in self._steps],
            "finished": {
                "steps": ended.parents[:, 0].tolist(),
                "parents": ended.parents[:, 1].tolist(),
                "tokens": ended.tokens.tolist(),
                "scores": _rounded_trie_scores(ended.scores.tolist()),
            },
            "returned": [*returned],
            "forests": self._forests,
            "accepted": [self._accepted.get(step, []) for step in steps],
            "blocks": [self._blocks.get(step) for step in steps],
        }


def _rounded_trie_scores(scores: Sequence[float]) -> list[float | None]:
    """Scores rounded for JSON; None if there is no beam."""
    return [round(score, DIGITS) if math.isfinite(score) else None for score in scores]
