"""A hypothesis as it is returned."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class TokenReports(NamedTuple):
    """What is returned of tokens besides: of those of a hypothesis, or of all rows' newest ones."""

    token_ids: np.ndarray  # [tokens, 1 + N] int32, each one's own, then the best at its place
    logprobs: np.ndarray  # [tokens, 1 + N] float32, theirs
    ranks: np.ndarray  # [tokens] int32, its own at its place, from 1

    def after(self, count: int) -> TokenReports:
        """Those of all tokens but the first `count`."""
        return TokenReports(*(field[count:] for field in self))


class Hypothesis(NamedTuple):
    """One hypothesis as it is returned."""

    token_ids: list[int]
    sum_logprobs: float
    score: float  # what it competes by
    stopped_by: int | None  # the stop token it ends in; None if it ran out of length, or otherwise
    reports: TokenReports | None  # if log-probabilities are returned
    is_complete: bool = False  # its items are: it did not run out of length
    is_running: bool = False  # a beam of a search that was aborted
    leaf: int = -1  # its number in the hypothesis trie
