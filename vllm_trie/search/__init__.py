"""The rules of the search: pure numpy and torch, independent of vLLM."""

from functools import cache
from pkgutil import resolve_name
from typing import Any

import numpy as np


@cache
def search_part_on_demand(name: str) -> Any:
    """An object that few searches need, by "module:name" in this package; its module is imported on first use."""
    return resolve_name(f"{__name__}.{name}")


def search_spans(starts: np.ndarray | int, lengths: np.ndarray) -> np.ndarray:
    """The numbers start, start + 1, ... of several spans, one span after the other.

    Args:
        starts: First number of each span [n], or of all spans.
        lengths: [n], how many numbers each span has.
    """
    ends = lengths.cumsum()
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
