"""One step of beam search: from ranked candidates to the rows of the next step.

Everything here works on G groups of equal width at once and loops over neither candidates nor
vocabulary. Source of the rules: transformers 5.19 `GenerationMixin._beam_search`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Candidates(NamedTuple):
    """Continuations of each group's beams in total order: score desc, parent asc, token asc.

    Shapes [G, K] while ranking G groups, [K] for a single group.
    """

    parents: np.ndarray  # row the continuation extends
    tokens: np.ndarray
    scores: np.ndarray  # float32, cumulative log-probability


class Step(NamedTuple):
    """What one step decided. Shapes [G, b], or [b] for a single group."""

    parents: np.ndarray  # by slot: the slot whose beam this slot continues
    tokens: np.ndarray  # by slot
    scores: np.ndarray  # by slot, float32
    candidates: Candidates  # the best b candidates, finished or not, in rank order
    finished: np.ndarray  # bool: which of `candidates` end in a stop token

    def group(self, index: int) -> Step:
        """The step of one group out of G."""
        candidates = Candidates(*(field[index] for field in self.candidates))
        return Step(self.parents[index], self.tokens[index], self.scores[index], candidates, self.finished[index])


def num_candidates(width: int, num_stop_tokens: int) -> int:
    """How many candidates must be ranked so that `width` of them can go on.

    Each of the b beams can propose every stop token once, so (1 + stop tokens) * b always leave b
    others. transformers ranks at least 2b; so do we.
    """
    return max(2, 1 + num_stop_tokens) * width


def beam_step(candidates: Candidates, width: int, stop_token_ids: tuple[int, ...]) -> Step:
    """Split ranked candidates into the next b beams and those that finish.

    A candidate finishes if it ends in a stop token and ranks among the best `width`; the first
    `width` others live on. Their slots come from `assign_slots`.

    Args:
        candidates: [G, K] in total order, K >= `num_candidates(width, len(stop_token_ids))`.
        width: Beams per group, b.
        stop_token_ids: Tokens that end a hypothesis; may be empty.
    """
    stops = np.isin(candidates.tokens, stop_token_ids)
    live = np.argsort(stops, axis=1, kind="stable")[:, :width]
    ranked = [np.take_along_axis(field, live, axis=1) for field in candidates]
    slots = assign_slots(ranked[0])
    parents, tokens, scores = (_scatter(field, slots) for field in ranked)
    best = Candidates(*(field[:, :width] for field in candidates))
    return Step(parents, tokens, scores, best, stops[:, :width])


def assign_slots(parents: np.ndarray) -> np.ndarray:
    """Give each surviving child a row such that copying never overwrites what is still needed.

    The first child of a parent stays in its parent's slot; every other child takes a dead slot, one
    whose own beam has no child, in ascending order. Sources (survivors) and destinations (dead
    slots) are therefore disjoint.

    Args:
        parents: [G, b] parent slot of each child, in rank order.

    Returns:
        [G, b] slot of each child; each row is a permutation of 0..b-1.
    """
    groups, width = parents.shape
    order = np.argsort(parents, axis=1, kind="stable")
    by_parent = np.take_along_axis(parents, order, axis=1)
    first_sorted = np.ones_like(by_parent, dtype=bool)
    first_sorted[:, 1:] = by_parent[:, 1:] != by_parent[:, :-1]
    first = _scatter(first_sorted, order)

    survives = np.zeros((groups, width), dtype=bool)
    np.put_along_axis(survives, parents, True, axis=1)
    dead_slots = np.argsort(survives, axis=1, kind="stable")
    nth_other = np.maximum(np.cumsum(~first, axis=1) - 1, 0)
    return np.where(first, parents, np.take_along_axis(dead_slots, nth_other, axis=1))


def _scatter(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    out = np.empty_like(values)
    np.put_along_axis(out, index, values, axis=1)
    return out
