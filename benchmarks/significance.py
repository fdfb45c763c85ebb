"""Means and ratios over samples, with what chance alone would make of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy import stats

ROUNDING = 1e-12  # of a logarithm


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval, by Student's t."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3g} ({self.low:.3g}–{self.high:.3g})" if self.low == self.low else f"{self.mean:.3g}"


class Paired(NamedTuple):
    """Ratios of pairs: their geometric mean with its interval, and the paired t-test of the logarithms.

    `p` is NaN where there is nothing to test: of a single pair, and of ratios that are all the same.
    """

    ratio: Interval
    p: float
    n: int


def interval(samples: Sequence[float]) -> Interval:
    """Of the mean; without bounds (NaN) for a single sample."""
    mean = statistics.fmean(samples)
    if len(samples) < 2:
        return Interval(mean, math.nan, math.nan)
    half = stats.t.ppf(0.975, len(samples) - 1) * stats.sem(samples)
    return Interval(mean, mean - half, mean + half)


def paired(numerators: Sequence[float], denominators: Sequence[float]) -> Paired:
    """Compare what was measured side by side.

    Raises:
        ValueError: lengths differ, or something is not positive.
    """
    logs = [math.log(a / b) for a, b in zip(numerators, denominators, strict=True)]
    bounds = Interval(*map(math.exp, interval(logs)))
    vary = max(logs) - min(logs) > ROUNDING
    p = float(stats.ttest_1samp(logs, 0.0).pvalue) if vary else math.nan
    return Paired(bounds, p, len(logs))


def shown_p(p: float) -> str:
    """As papers print it."""
    return "" if p != p else "<0.001" if p < 0.001 else f"{p:.3f}"
