"""Hypotheses as `BeamGroup` returns them to the scheduler, which makes outputs of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from vllm_trie.search.stopping import NO_TOKEN


class GroupTokenReports(NamedTuple):
    """Log-probabilities of tokens: of whole hypotheses, or of the newest token of each row."""

    token_ids: np.ndarray  # [tokens, 1 + N] int32, the token, then the N best at its position
    logprobs: np.ndarray  # [tokens, 1 + N] float32, of these tokens
    ranks: np.ndarray  # [tokens] int32, the token's rank at its position, from 1

    def some(self, which: slice) -> GroupTokenReports:
        """The reports of some tokens."""
        return GroupTokenReports(self.token_ids[which], self.logprobs[which], self.ranks[which])


@dataclass(frozen=True, eq=False)
class GroupHypotheses:
    """Hypotheses as a search returns them, best first. Each field but `reports` has an entry per hypothesis."""

    leaves: np.ndarray  # [n] int64, numbers in the hypothesis trie; < 0 for running beams of an aborted search
    token_ids: list[list[int]]
    sum_logprobs: np.ndarray  # [n] float64
    scores: np.ndarray  # [n] float64, by which they compete
    stopped_by: np.ndarray  # [n] int64, the stop token at its end; NO_TOKEN if something else, or nothing, ended it
    has_ended: np.ndarray  # [n] bool, by a stop token, or with its items
    reports: GroupTokenReports | None = None  # of all tokens, by hypothesis, if log-probabilities are returned

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def lengths(self) -> np.ndarray:
        """[n] int64, the tokens of each hypothesis."""
        return np.array([*map(len, self.token_ids)], np.int64)

    def stop_tokens(self, unreported: int | None = None) -> list[int | None]:
        """The stop token at the end of each; None if there is none, or if it is `unreported`."""
        return [None if token in (NO_TOKEN, unreported) else token for token in self.stopped_by.tolist()]

    def first(self, count: int) -> GroupHypotheses:
        """The best `count` hypotheses, or all if there are fewer."""
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
        """The only hypothesis without its first `count` tokens, whose log-probabilities sum to `sum_logprobs`."""
        (tokens,) = self.token_ids
        reports = self.reports and self.reports.some(slice(count, None))
        sums = self.sum_logprobs - sum_logprobs
        return replace(self, token_ids=[tokens[count:]], sum_logprobs=sums, reports=reports)


NO_HYPOTHESES = GroupHypotheses(
    np.zeros(0, np.int64), [], np.zeros(0), np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.bool_)
)
