"""A hypothesis as it is returned."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class TokenReport(NamedTuple):
    """What is returned of one token of a hypothesis."""

    token_ids: np.ndarray  # [1 + N] its own, then the best at its place
    logprobs: np.ndarray  # [1 + N] float32, theirs
    rank: int  # its own at its place, from 1


class Hypothesis(NamedTuple):
    """One hypothesis as it is returned."""

    token_ids: list[int]
    sum_logprobs: float
    score: float  # what it competes by
    stopped_by: int | None  # the stop token it ends in; None if it ran out of length, or otherwise
    reports: list[TokenReport] | None  # by token, if log-probabilities are returned
    is_complete: bool = False  # its items are: it did not run out of length
    is_running: bool = False  # a beam of a search that was aborted
    node: int = -1  # its last token in the hypothesis trie
