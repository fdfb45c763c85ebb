"""Minimum Bayes risk: of a pool of hypotheses the one that is most like all of them, by what a metric says of pairs.

The hypotheses are their own pseudo-references (Eikema and Aziz, arXiv 2108.04718). Knows nothing of metrics: whoever
calls judges pairs of texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_trie.finite_numbers import finite_numbers

FIRST_REFERENCES = 8  # of a search of pairs that prunes; each round has twice as many
NUM_RESAMPLES = 500
SEED = 0  # the same pool is always ranked alike

Pairs = list[tuple[str, str]]  # a hypothesis, and a pseudo-reference


class MetricError(ValueError):
    """A metric failed, or returned what are no numbers."""


class Ranking(NamedTuple):
    """A pool in its new order.

    Args:
        order: Indices of its hypotheses, best first; of equal ones the one that came first.
        utilities: Of each hypothesis, as the pool has them: the mean of what the metric says of it and each reference;
            of one that was pruned, over the references until then.
        num_judged: Pairs that the metric saw.
    """

    order: list[int]
    utilities: list[float]
    num_judged: int


def rank_by_risk(
    texts: Sequence[str],
    judge: Callable[[Pairs], Iterable[Any]],
    weights: np.ndarray | None = None,
    confidence: float | None = None,
    num_best: int = 1,
) -> Ranking:
    """Order a pool by expected utility, the highest first.

    Args:
        texts: Of its hypotheses; equal ones count as often as they are there, and are judged once.
        judge: Says of pairs how good the hypothesis is if the reference is right: a number for each, the higher the
            better.
        weights: [texts] of each as a reference; by default all weigh the same.
        confidence: See `_pruned_by_risk`; None judges all pairs.
        num_best: How many of the order matter; so many are never pruned.

    Raises:
        MetricError: `judge` returned something else than as many finite numbers.
    """
    distinct = list(dict.fromkeys(texts))
    place = {text: index for index, text in enumerate(distinct)}
    places = np.array([place[text] for text in texts])
    table = _RiskTable(distinct, judge)
    if confidence is None:
        everywhere = np.arange(len(distinct))
        shares = np.bincount(places, weights)
        utilities, rounds = table.judged(everywhere, everywhere) @ (shares / shares.sum()), np.zeros(len(distinct))
    else:
        utilities, rounds = _pruned_by_risk(table, places, confidence, num_best)
    of_texts, reached = utilities[places], rounds[places]
    order = np.lexsort((np.arange(len(texts)), -of_texts, -reached))
    return Ranking(order.tolist(), of_texts.tolist(), table.num_judged)


class _RiskTable:
    """What the metric said of pairs of distinct texts."""

    def __init__(self, texts: list[str], judge: Callable[[Pairs], Iterable[Any]]) -> None:
        self._texts, self._judge = texts, judge
        self._known = np.full((len(texts), len(texts)), math.nan)  # hypotheses by references
        self.num_judged = 0

    def judged(self, hypotheses: np.ndarray, references: np.ndarray) -> np.ndarray:
        """[hypotheses, references] float64; asks for those that are not known yet."""
        asked = np.zeros_like(self._known, dtype=bool)
        asked[np.ix_(hypotheses, references)] = True
        at = np.argwhere(asked & np.isnan(self._known))
        pairs = [(self._texts[hypothesis], self._texts[reference]) for hypothesis, reference in at]
        if pairs:
            self._known[tuple(at.T)] = finite_numbers(self._judge(pairs), len(pairs), "metric", "pair", MetricError)
        self.num_judged += len(pairs)
        return self._known[np.ix_(hypotheses, references)]


def _pruned_by_risk(
    table: _RiskTable, places: np.ndarray, confidence: float, num_best: int
) -> tuple[np.ndarray, np.ndarray]:
    """Confidence-based pruning (Cheng and Vlachos, arXiv 2311.14919, algorithms 1 and 2).

    Twice as many references in each round, drawn from the pool without replacement: a hypothesis is dropped once it
    would be as good as the best one in no more than 1 - `confidence` of resamples of the references.

    Args:
        places: [pool] the distinct text of each hypothesis.

    Returns:
        [distinct] expected utilities, and the rounds that each was in.
    """
    rng = np.random.default_rng(SEED)
    references = places[rng.permutation(len(places))]
    alive = np.unique(places)
    utilities, rounds = np.zeros(len(alive)), np.zeros(len(alive))
    num_references, number = min(FIRST_REFERENCES, len(places)), 0
    while True:
        number += 1
        judged = table.judged(alive, references[:num_references])
        means = judged.mean(1)
        utilities[alive], rounds[alive] = means, number
        if num_references == len(places) or len(alive) <= num_best:
            return utilities, rounds
        resamples = rng.multinomial(num_references, np.full(num_references, 1 / num_references), NUM_RESAMPLES)
        resampled = judged @ resamples.T / num_references  # [alive, resamples]
        best = np.argsort(-means, kind="stable")
        wins = (resampled >= resampled[best[0]]).mean(1)
        stays = wins > 1 - confidence
        stays[best[:num_best]] = True
        alive = alive[stays]
        num_references = min(2 * num_references, len(places))
