"""The rules of the search: numpy and torch only, nothing of vLLM."""

from functools import cache
from pkgutil import resolve_name
from typing import Any

import numpy as np


@cache
def search_part_on_demand(name: str) -> Any:
    """What few searches need, by "module:name" in this package: the first search that does loads it."""
    return resolve_name(f"{__name__}.{name}")


def search_spans(starts: np.ndarray | int, lengths: np.ndarray) -> np.ndarray:
    """Consecutive numbers: start, start + 1, ... for each of some spans, one after the other.

    Args:
        starts: Theirs, or that of all of them.
        lengths: [n], theirs.
    """
    ends = lengths.cumsum()
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
