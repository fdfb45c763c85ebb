"""Consecutive numbers, for many spans at once."""

from __future__ import annotations

import numpy as np


def spans(starts: np.ndarray | int, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, ... for each of some spans, one after the other; `starts`: theirs, or that of all of them."""
    ends = lengths.cumsum()
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
