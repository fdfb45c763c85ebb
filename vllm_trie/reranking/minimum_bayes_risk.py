"""Minimum Bayes risk: ranks a pool of hypotheses by their similarity to all of the pool, for `offline.py`.

The hypotheses are their own pseudo-references (Eikema and Aziz, arXiv 2108.04718). The caller supplies the metric as a
function that judges pairs of texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_trie.finite_numbers import finite_numbers

FIRST_REFERENCES = 8  # in the first round of pruning; each further round has twice as many
NUM_RESAMPLES = 500
SEED = 0  # fixed, so that the same pool is always ranked the same way

Pairs = list[tuple[str, str]]  # a hypothesis, and a pseudo-reference


class MetricError(ValueError):
    """A metric failed, or did not return numbers."""


class Ranking(NamedTuple):
    """A pool in its new order.

    Args:
        order: Indices of its hypotheses, best first; ties go to the earlier one.
        utilities: The utility of each hypothesis, in the order of the pool: the mean of the metric over all references,
            or over the references until it was pruned.
        num_judged: Pairs that the metric judged.
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
        texts: Of its hypotheses; equal ones count as often as they occur, and are judged once.
        judge: Judges the hypothesis of each pair, if its reference is correct, by a number: the higher the better.
        weights: [texts] the weight of each as a reference; by default all are equal.
        confidence: See `_pruned_by_risk`; None judges all pairs.
        num_best: How many of the order matter; so many are never pruned.

    Raises:
        MetricError: `judge` did not return one finite number per pair.
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
    """The metric's values of pairs of distinct texts, each computed once."""

    def __init__(self, texts: list[str], judge: Callable[[Pairs], Iterable[Any]]) -> None:
        self._texts, self._judge = texts, judge
        self._known = np.full((len(texts), len(texts)), math.nan)  # hypotheses by references
        self.num_judged = 0

    def judged(self, hypotheses: np.ndarray, references: np.ndarray) -> np.ndarray:
        """[hypotheses, references] float64; calls the metric for those that are not known yet."""
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

    Each round samples twice as many references from the pool, without replacement. A hypothesis is dropped once it is
    as good as the best one in no more than 1 - `confidence` of resamples of the references.

    Args:
        places: [pool] the distinct text of each hypothesis.

    Returns:
        [distinct] expected utilities, and the number of rounds of each.
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
