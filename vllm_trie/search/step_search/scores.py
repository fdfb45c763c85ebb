"""What scorers return, checked."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


class ScorerError(ValueError):
    """A scorer failed, or returned what are no scores."""


def checked_scores(scores: Iterable[Any], count: int) -> list[float]:
    """What a scorer returned, as `count` numbers.

    Raises:
        ScorerError: it is something else.
    """
    try:
        values = [float(score) for score in scores]
    except (TypeError, ValueError, OverflowError) as error:
        raise ScorerError(f"the scorer returned what are no scores: {error}; return a number per candidate") from None
    if len(values) != count:
        raise ScorerError(f"the scorer returned {len(values)} scores for {count} candidates; return one for each")
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise ScorerError(f"the scorer returned {value} for candidate {index} of {count}; return finite numbers")
    return values
