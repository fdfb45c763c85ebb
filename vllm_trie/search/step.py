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
    groups = np.arange(len(candidates.tokens))[:, None]
    stops = np.zeros(candidates.tokens.shape, dtype=bool)
    for token_id in stop_token_ids:
        stops |= candidates.tokens == token_id
    live = np.argsort(stops, axis=1, kind="stable")[:, :width]
    slots = assign_slots(candidates.parents[groups, live])
    in_slots = np.empty_like(live)
    in_slots[groups, slots] = live
    best = Candidates(*(field[:, :width] for field in candidates))
    parents, tokens, scores = (field[groups, in_slots] for field in candidates)
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
    num_groups, width = parents.shape
    groups = np.arange(num_groups)[:, None]
    order = np.argsort(parents, axis=1, kind="stable")
    by_parent = parents[groups, order]
    is_first = np.ones((num_groups, width), dtype=bool)
    is_first[:, 1:] = by_parent[:, 1:] != by_parent[:, :-1]
    first = np.empty_like(is_first)
    first[groups, order] = is_first

    survives = np.zeros((num_groups, width), dtype=bool)
    survives[groups, parents] = True
    dead_slots = np.argsort(survives, axis=1, kind="stable")
    nth_other = np.maximum(np.cumsum(~first, axis=1) - 1, 0)
    return np.where(first, parents, dead_slots[groups, nth_other])
