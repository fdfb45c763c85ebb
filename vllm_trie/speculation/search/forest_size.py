"""Which size of forest pays off, by the measured cost of steps and by how earlier forests were accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

FADING = 0.95  # weight of an observation, per later one
OUTLIER = 3.0  # times the expected seconds: anything longer counts as this much
SOLVED_EVERY = 16  # observations, where costs need not be up to date
ENOUGH = 10  # observations, before outliers are judged by what is expected
RIDGE = 1e-9  # makes features that never changed share their cost

LEAST_GAIN = 0.97  # a forest must take at most this share of a plain step's time per step

REMEMBERED = 0.97  # share of past acceptance, per choice: so that what failed is tried again eventually
HOPE, WEIGHT_OF_HOPE = 0.75, 2.0  # prior: that a layer leads on; and how many observations this counts as
WEIGHT_OF_OTHERS = 4.0  # observations that the acceptance of other searches counts as


class ForestSize(NamedTuple):
    """The size of a forest."""

    num_layers: int  # 0: none, a plain step
    draft_width: int = 0


PLAIN = ForestSize(0)


class ForestCost:
    """Estimates seconds as a sum of features times their costs: non-negative least squares, old observations fade.

    Args:
        num_features: Numbers that describe what takes time.
    """

    def __init__(self, num_features: int) -> None:
        self.count = 0  # observations
        self._normal, self._moment = np.zeros((num_features, num_features)), np.zeros(num_features)
        self._costs: list[float] = []  # by feature
        self._num_solved = -SOLVED_EVERY  # observations when the costs were solved; initially long ago

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Adds an observation: what has these features took this long."""
        if self.count >= ENOUGH:
            seconds = min(seconds, OUTLIER * self._sum(features, most_new=SOLVED_EVERY))
        of_features = np.array(features, dtype=np.float64)
        self.count += 1
        self._normal = FADING * self._normal + np.outer(of_features, of_features)
        self._moment = FADING * self._moment + of_features * seconds

    def expected(self, *features: float) -> float:
        """The estimated seconds of something with these features."""
        return self._sum(features, most_new=0)

    def _sum(self, features: Sequence[float], most_new: int) -> float:
        """Estimated seconds, by costs that lag at most `most_new` observations behind."""
        if self.count - self._num_solved > most_new:
            self._costs, self._num_solved = self._solved().tolist(), self.count
        return sum(cost * feature for cost, feature in zip(self._costs, features, strict=True))

    def _solved(self) -> np.ndarray:
        """The cost of each feature. A feature whose cost is negative is dropped, and the others are solved again."""
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
    """The costs of steps in this engine."""

    def __init__(self) -> None:
        self.plain = ForestCost(2)  # by 1 and tokens
        self.verifying = ForestCost(2)  # by 1 and tokens
        self.drafting = ForestCost(3)  # by 1, layers and drafts


class DraftAcceptance:
    """How often a layer of drafts led to one more step.

    Args:
        num_layers: The most layers of a forest.
        others: The acceptance assumed while little is known; None: the prior `HOPE`.
    """

    def __init__(self, num_layers: int, others: DraftAcceptance | None = None) -> None:
        self._others = others
        self._led, self._tried = np.zeros((2, num_layers))

    def observe(self, num_layers: int, num_steps: int) -> None:
        """A forest of `num_layers` layers led to `num_steps` steps; the first step needs no forest."""
        self._tried[: min(num_steps, num_layers)] += 1
        self._led[: num_steps - 1] += 1

    def forget(self) -> None:
        """Lowers the weight of all observations so far."""
        self._led *= REMEMBERED
        self._tried *= REMEMBERED

    def rates(self) -> np.ndarray:
        """[layers], the probability that each layer leads on if all earlier ones did."""
        known, weight = (HOPE, WEIGHT_OF_HOPE) if self._others is None else (self._others.rates(), WEIGHT_OF_OTHERS)
        return (self._led + weight * known) / (self._tried + weight)

    def expected_steps(self) -> list[float]:
        """[layers], the expected steps of forests of 1, 2, ... layers."""
        return (1 + self.rates().cumprod().cumsum()).tolist()


def fastest_forest_size(
    costs: StepCosts, acceptance: Mapping[int, DraftAcceptance], most_layers: int, num_tokens: int
) -> ForestSize:
    """The size of forest with the least time per step.

    Args:
        costs: The costs of steps.
        acceptance: The group's, by draft width.
        most_layers: The most layers that the forest may have.
        num_tokens: Tokens that the step computes without the forest.
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
