"""Hypotheses as they are returned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from vllm_trie.search.stopping import NO_TOKEN


class GroupTokenReports(NamedTuple):
    """What is returned of tokens besides: of those of hypotheses, or of all rows' newest ones."""

    token_ids: np.ndarray  # [tokens, 1 + N] int32, each one's own, then the best at its place
    logprobs: np.ndarray  # [tokens, 1 + N] float32, theirs
    ranks: np.ndarray  # [tokens] int32, its own at its place, from 1

    def some(self, which: slice) -> GroupTokenReports:
        """Those of some tokens."""
        return GroupTokenReports(self.token_ids[which], self.logprobs[which], self.ranks[which])


@dataclass(frozen=True, eq=False)
class GroupHypotheses:
    """Hypotheses as a search returns them, best first: of each field one entry of each, but for `reports`."""

    leaves: np.ndarray  # [n] int64, their numbers in the hypothesis trie; below 0 of beams of a search that was aborted
    token_ids: list[list[int]]
    sum_logprobs: np.ndarray  # [n] float64
    scores: np.ndarray  # [n] float64, what they compete by
    stopped_by: np.ndarray  # [n] int64, the stop token that one ends in; NO_TOKEN where another rule, or none, ended it
    has_ended: np.ndarray  # [n] bool, by a stop token, or with its items
    reports: GroupTokenReports | None = None  # of the tokens of one after the other, if log-probabilities are returned

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def lengths(self) -> np.ndarray:
        """[n] int64: tokens of each."""
        return np.array([*map(len, self.token_ids)], np.int64)

    def stop_tokens(self, unreported: int | None = None) -> list[int | None]:
        """Of each the stop token that it ends in; None where there is none, or it is `unreported`."""
        return [None if token in (NO_TOKEN, unreported) else token for token in self.stopped_by.tolist()]

    def first(self, count: int) -> GroupHypotheses:
        """The best `count`, if there are as many."""
        if len(self) <= count:
            return self
        end = sum(map(len, self.token_ids[:count]))
        return GroupHypotheses(
            self.leaves[:count],
            self.token_ids[:count],
            self.sum_logprobs[:count],
            self.scores[:count],
            self.stopped_by[:count],
            self.has_ended[:count],
            self.reports and self.reports.some(slice(end)),
        )

    def after(self, count: int, sum_logprobs: float) -> GroupHypotheses:
        """The one that there is without its first `count` tokens, whose log-probabilities have this sum."""
        (tokens,) = self.token_ids
        reports = self.reports and self.reports.some(slice(count, None))
        sums = self.sum_logprobs - sum_logprobs
        return replace(self, token_ids=[tokens[count:]], sum_logprobs=sums, reports=reports)


NO_HYPOTHESES = GroupHypotheses(
    np.zeros(0, np.int64), [], np.zeros(0), np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.bool_)
)
