"""One step of beam search: from ranked candidates to the rows of the next step.

Everything here works on G groups of equal width at once and loops over neither candidates nor
vocabulary. There is one step function per `semantics`: what they share is `settle`.
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

    def take(self, groups: np.ndarray, index: np.ndarray) -> Candidates:
        """Those at `index` [G, k] of each group."""
        return Candidates(*(field[groups, index] for field in self))


class Tops(NamedTuple):
    """The best k continuations of each row by themselves, best first. Shapes [r, k]."""

    tokens: np.ndarray
    logprobs: np.ndarray  # float32


class Step(NamedTuple):
    """What one step decided. Shapes [G, b] and [G, F], or [b] and [F] for a single group."""

    parents: np.ndarray  # by slot: the slot whose beam this slot continues
    tokens: np.ndarray  # by slot
    scores: np.ndarray  # by slot, float32; -inf where fewer than b continuations exist
    finished: Candidates  # hypotheses that end here, in the order in which they are kept on equal scores
    is_finished: np.ndarray  # bool: which of `finished` are meant; all, for a single group
    tops: Tops | None = None  # by parent, for a single group that asked for log-probabilities

    @property
    def num_beams(self) -> int:
        """Beams that live on, of a single group."""
        return int((self.scores > -np.inf).sum())

    def group(self, index: int, tops: Tops | None = None) -> Step:
        """The step of one group out of G."""
        chosen = self.is_finished[index]
        finished = Candidates(*(field[index][chosen] for field in self.finished))
        return Step(self.parents[index], self.tokens[index], self.scores[index], finished, chosen[chosen], tops)


def num_candidates(width: int, num_stop_tokens: int) -> int:
    """How many candidates must be ranked so that `width` of them can go on.

    Each of the b beams can propose every stop token once, so (1 + stop tokens) * b always leave b
    others. transformers ranks at least 2b; so do we.
    """
    return max(2, 1 + num_stop_tokens) * width


def hf_step(candidates: Candidates, stops: np.ndarray, width: int, is_last: bool) -> Step:
    """Split ranked candidates into the next b beams and those that finish, as transformers does.

    A candidate finishes if it stops and ranks among the best `width`; in the last step all of these
    do. The first `width` others live on. Source: transformers 5.19 `GenerationMixin._beam_search`.

    Args:
        candidates: [G, K] in total order, K >= `num_candidates`.
        stops: [G, K] bool, which of them end in a stop token or complete a stop string.
        width: Beams per group, b.
        is_last: The length is reached.
    """
    best = Candidates(*(field[:, :width] for field in candidates))
    is_finished = stops[:, :width] | is_last
    return settle(candidates, candidates.scores, stops, width, best, is_finished)


def tridecode_step(candidates: Candidates, stops: np.ndarray, width: int, is_last: bool) -> Step:
    """Split ranked candidates into the next b beams and those that finish, as the trie paper's code does.

    Whatever stops and ranks before the `width`-th that does not finishes. The first `width` others live
    on, and finish too in the last step. Source: Efficient Beam Search for LLMs Using Trie-Based
    Decoding, published code. Arguments as for `hf_step`.
    """
    others = (~stops).cumsum(axis=1)  # that do not stop, up to and with each candidate
    is_finished = np.where(stops, others < width, is_last & (others <= width))
    return settle(candidates, candidates.scores, stops, width, candidates, is_finished)


def vllm_step(
    candidates: Candidates,
    merits: np.ndarray,
    stops: np.ndarray,
    stopping: Candidates,
    is_stopping: np.ndarray,
    width: int,
    is_last: bool,
) -> Step:
    """Split candidates into the next b beams and those that finish, as `LLM.beam_search` does.

    Whatever stops among each beam's own best continuations finishes, however it ranks among all. The
    best `width` others live on, and finish too in the last step. Source: vLLM 0.32
    `BeamSearchOfflineMixin._beam_search_step`.

    Args:
        candidates: [G, K], any order on unequal merits.
        merits: [G, K] float32, what candidates are compared by to live on.
        stops: [G, K] bool, which of them end in a stop token or complete a stop string.
        stopping: [G, S], continuations that may stop, of any beam.
        is_stopping: [G, S] bool, which of them do.
        width: Beams per group, b.
        is_last: The length is reached.
    """
    step = settle(candidates, merits, stops, width, stopping, is_stopping)
    if not is_last:
        return step
    by_score = np.argsort(-step.scores, axis=1, kind="stable")
    live = Candidates(step.parents, step.tokens, step.scores).take(_groups(by_score), by_score)
    finished = Candidates(*(np.concatenate(pair, axis=1) for pair in zip(stopping, live, strict=True)))
    return step._replace(finished=finished, is_finished=np.concatenate([is_stopping, live.scores > -np.inf], axis=1))


def drawn_step(drawn: Candidates, stops: np.ndarray, width: int, is_last: bool) -> tuple[Step, np.ndarray]:
    """Let the beams that were drawn live on, or finish where they stop; in the last step all finish.

    Args:
        drawn: [1, K], continuations of living beams, K <= width.
        stops: [1, K] bool, which of them end in a stop token or complete a stop string.
        width: Beams of the group, b; those that were not drawn are dead.
        is_last: The length is reached.

    Returns:
        The step, and the slot of each drawn beam, [K]; -1 for those that stop.
    """
    count = drawn.tokens.shape[1]
    fill = ((0, 0), (0, width - count))
    parents = np.pad(drawn.parents, fill, constant_values=drawn.parents[0, 0] if count else 0)
    alive = np.pad(~stops, fill)
    living_first = np.argsort(~alive, axis=1, kind="stable")  # they keep the slots of their parents
    slots = np.empty_like(living_first)
    np.put_along_axis(slots, living_first, assign_slots(np.take_along_axis(parents, living_first, axis=1)), axis=1)
    tokens, scores = np.pad(drawn.tokens, fill), np.pad(drawn.scores, fill, constant_values=np.float32(-np.inf))
    in_slots = np.argsort(slots, axis=1)
    scores = np.where(alive, scores, np.float32(-np.inf))
    of_slots = Candidates(parents, tokens, scores).take(_groups(in_slots), in_slots)
    step = Step(of_slots.parents, of_slots.tokens, of_slots.scores, drawn, stops | is_last)
    return step, np.where(stops, -1, slots[:, :count])[0]


def best_of(step: Step) -> Step:
    """The same step of a single group, after which only its best beam goes on."""
    best = slice(at := int(step.scores.argmax()), at + 1)
    return step._replace(parents=step.parents[best], tokens=step.tokens[best], scores=step.scores[best])


def settle(
    candidates: Candidates,
    merits: np.ndarray,
    stops: np.ndarray,
    width: int,
    finished: Candidates,
    is_finished: np.ndarray,
) -> Step:
    """Let the best `width` candidates that do not stop live on, and give them their slots.

    Where there are fewer, the remaining slots are dead: their score is -inf, and whatever is alive
    displaces them in the next step.
    """
    groups = _groups(candidates.tokens)
    by_merit = np.argsort(np.where(stops, np.inf, -merits), axis=1, kind="stable")[:, :width]
    alive = ~stops[groups, by_merit]
    slots = assign_slots(candidates.parents[groups, by_merit])
    in_slots = np.empty_like(by_merit)
    in_slots[groups, slots] = by_merit
    alive_in_slots = np.empty_like(alive)
    alive_in_slots[groups, slots] = alive
    parents, tokens, scores = candidates.take(groups, in_slots)
    return Step(parents, tokens, np.where(alive_in_slots, scores, np.float32(-np.inf)), finished, is_finished)


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


def _groups(of: np.ndarray) -> np.ndarray:
    return np.arange(len(of))[:, None]
