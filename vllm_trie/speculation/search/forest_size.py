"""How large a forest pays, by what steps cost here and by what was accepted of the forests before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

FADING = 0.95  # of an observation, with each one after it
OUTLIER = 3.0  # times what was expected: what takes longer than that counts as no longer
SOLVED_EVERY = 16  # observations, where costs need not be the newest
ENOUGH = 10  # observations, before anything is expected with that confidence
RIDGE = 1e-9  # so that features that never changed share their cost

LEAST_GAIN = 0.97  # times a plain step is what a forest must take per step at most: less gain is none

REMEMBERED = 0.97  # of what was accepted, with each choice: so that what failed is tried again some day
HOPE, WEIGHT_OF_HOPE = 0.75, 2.0  # that a layer leads on before any is seen, and how many seen ones that counts as
WEIGHT_OF_OTHERS = 4.0  # likewise, of other searches


class ForestSize(NamedTuple):
    """Of the next forest."""

    num_layers: int  # 0: none, a plain step
    draft_width: int = 0


PLAIN = ForestSize(0)


class ForestCost:
    """Seconds as a sum of features, each times what it costs: least squares, no cost negative, old times fade.

    Args:
        num_features: Numbers that describe what takes time.
    """

    def __init__(self, num_features: int) -> None:
        self.count = 0  # observations
        self._normal, self._moment = np.zeros((num_features, num_features)), np.zeros(num_features)
        self._costs: list[float] = []  # of each feature
        self._num_solved = -SOLVED_EVERY  # observations that these come of; before any, too long ago

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Take in how long something took."""
        if self.count >= ENOUGH:
            seconds = min(seconds, OUTLIER * self._sum(features, most_new=SOLVED_EVERY))
        of_features = np.array(features, dtype=np.float64)
        self.count += 1
        self._normal = FADING * self._normal + np.outer(of_features, of_features)
        self._moment = FADING * self._moment + of_features * seconds

    def expected(self, *features: float) -> float:
        """Seconds that something will take."""
        return self._sum(features, most_new=0)

    def _sum(self, features: Sequence[float], most_new: int) -> float:
        """Seconds by costs that are older than so many observations at most."""
        if self.count - self._num_solved > most_new:
            self._costs, self._num_solved = self._solved().tolist(), self.count
        return sum(cost * feature for cost, feature in zip(self._costs, features, strict=True))

    def _solved(self) -> np.ndarray:
        """What each feature costs. The one whose cost comes out negative is free, and the others bear it."""
        costs, paid = np.zeros(len(self._moment)), np.arange(len(self._moment))
        while len(paid):
            normal = self._normal[np.ix_(paid, paid)]
            of_paid = np.linalg.solve(normal + RIDGE * np.trace(normal) * np.eye(len(paid)), self._moment[paid])
            if of_paid.min() >= 0:
                costs[paid] = of_paid
                break
            paid = np.delete(paid, of_paid.argmin())
        return costs


class StepCosts:
    """What steps of this engine cost."""

    def __init__(self) -> None:
        self.plain = ForestCost(2)  # by 1 and tokens
        self.verifying = ForestCost(2)  # likewise
        self.drafting = ForestCost(3)  # by 1, layers and drafts


class DraftAcceptance:
    """How often a layer of drafts led to one more step.

    Args:
        num_layers: The most that a forest has.
        others: What is expected as long as little is known; by default hope.
    """

    def __init__(self, num_layers: int, others: DraftAcceptance | None = None) -> None:
        self._others = others
        self._led, self._tried = np.zeros((2, num_layers))

    def observe(self, num_layers: int, num_steps: int) -> None:
        """A forest of so many layers led to so many steps; the first step needs no forest."""
        self._tried[: min(num_steps, num_layers)] += 1
        self._led[: num_steps - 1] += 1

    def forget(self) -> None:
        """Let what was observed count less."""
        self._led *= REMEMBERED
        self._tried *= REMEMBERED

    def rates(self) -> np.ndarray:
        """[layers] the probability that each leads on, if those before it did."""
        known, weight = (HOPE, WEIGHT_OF_HOPE) if self._others is None else (self._others.rates(), WEIGHT_OF_OTHERS)
        return (self._led + weight * known) / (self._tried + weight)

    def expected_steps(self) -> list[float]:
        """[layers] the steps that forests of 1, 2, ... layers lead to."""
        return (1 + self.rates().cumprod().cumsum()).tolist()


def fastest_forest_size(
    costs: StepCosts, acceptance: Mapping[int, DraftAcceptance], most_layers: int, num_tokens: int
) -> ForestSize:
    """The size of forest that takes the least time per step.

    Args:
        costs: Of steps.
        acceptance: By draft width, of the group.
        most_layers: That the forest may have.
        num_tokens: That the step computes anyway.
    """
    best, least = PLAIN, costs.plain.expected(1, num_tokens) * LEAST_GAIN
    for draft_width, accepted in acceptance.items():
        for num_layers, num_steps in enumerate(accepted.expected_steps()[:most_layers], start=1):
            num_drafts = num_layers * draft_width
            verifying, drafting = costs.verifying, costs.drafting
            seconds = verifying.expected(1, num_tokens + num_drafts) + drafting.expected(1, num_layers, num_drafts)
            if seconds < least * num_steps:
                best, least = ForestSize(num_layers, draft_width), seconds / num_steps
    return best
