"""When a search is over, and what it returns: the pool of finished hypotheses, by `semantics`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

EarlyStopping = bool | Literal["never"]
NO_TOKEN = -1


def are_search_tokens_among(tokens: np.ndarray, some: frozenset[int]) -> np.ndarray:
    """[n] bool: which of a few tokens are among these, of which there may be as many as the vocabulary has."""
    return np.array([token in some for token in tokens.tolist()], np.bool_)


class FinishedSearchHypotheses(NamedTuple):
    """Finished hypotheses, best first; of equal ones the earlier."""

    scores: np.ndarray  # [n] float64, what they compete by
    leaves: np.ndarray  # [n] int64, their numbers in the hypothesis trie

    @classmethod
    def in_order(cls, *parts: FinishedSearchHypotheses) -> FinishedSearchHypotheses:
        """All of these parts, the best first: of equal ones the one that is in an earlier part, or comes first."""
        scores, leaves = (np.concatenate(fields) for fields in zip(*parts, strict=True))
        order = np.argsort(-scores, kind="stable")
        return cls(scores[order], leaves[order])

    def some(self, which: slice | np.ndarray) -> FinishedSearchHypotheses:
        """Some of them."""
        return FinishedSearchHypotheses(self.scores[which], self.leaves[which])


class EndedSearchHypotheses(NamedTuple):
    """Hypotheses that end in the same step."""

    sums: np.ndarray  # [n] float64, cumulative log-probabilities
    last_tokens: np.ndarray  # [n] integers
    leaves: np.ndarray  # [n] int64, in the hypothesis trie
    rows: np.ndarray  # [n] integers, the beams that they continue

    @classmethod
    def of(cls, sums: ArrayLike, last_tokens: ArrayLike, leaves: ArrayLike, rows: ArrayLike) -> EndedSearchHypotheses:
        """Those of sequences of numbers."""
        return cls(np.array(sums, np.float64), *(np.array(field, np.int64) for field in (last_tokens, leaves, rows)))

    def some(self, which: np.ndarray) -> EndedSearchHypotheses:
        """Those where `which` [n] is true."""
        return EndedSearchHypotheses._make(field[which] for field in self)


NO_FINISHED = FinishedSearchHypotheses(np.zeros(0), np.zeros(0, np.int64))
NO_ENDED = EndedSearchHypotheses.of([], [], [], [])


class SearchPool(ABC):
    """Where finished hypotheses compete, and when the search for them is over."""

    done: tuple[int, ...] = ()  # which groups of beams are
    most_boost: float = 0.0  # that a token can add to what they compete by, besides its log-probability, or infinite

    @abstractmethod
    def advance(self, ended: EndedSearchHypotheses, running: np.ndarray, length: int) -> tuple[np.ndarray, bool]:
        """Take in what one step has led to.

        Args:
            ended: Hypotheses of `length` generated tokens.
            running: [b] cumulative log-probabilities of beams as long; -inf where there is none.

        Returns:
            The leaves of what has no place among the finished (any more), and whether no running beam may enter any
            more.
        """

    def finishing(self, leaves: np.ndarray, ranks: np.ndarray, num_ranked: int, most: int) -> np.ndarray:
        """[n] bool: which of the hypotheses that end in a step finish: those among the best continuations.

        Args:
            leaves: [n], the best first, group of beams after group.
            ranks: [n] their places among continuations, likewise.
            num_ranked: Continuations of each group.
            most: The best ones of these.
        """
        return ranks < most

    @abstractmethod
    def scores(self, sums: np.ndarray, length: int, last_tokens: np.ndarray) -> np.ndarray:
        """[n] float64 what finished hypotheses compete by, of `length` generated tokens, the last one counted.

        Args:
            sums: [n] float64, cumulative log-probabilities.
            length: Tokens of each.
            last_tokens: [n].
        """

    @abstractmethod
    def best(self, count: int) -> FinishedSearchHypotheses:
        """The best `count`."""

    def best_so_far(self, count: int, running: EndedSearchHypotheses, length: int) -> FinishedSearchHypotheses:
        """The best `count` of what is finished and of running beams, as if these ended here; ties go to the finished.

        Args:
            running: All beams, of `length` generated tokens, as `EndedSearchHypotheses`; sums of -inf are of none.
        """
        beams = running.some(running.sums > -np.inf)
        going_on = FinishedSearchHypotheses(self.scores(beams.sums, length, beams.last_tokens), beams.leaves)
        return self.best_of(count, self.best(count), going_on)

    def best_of(self, count: int, *parts: FinishedSearchHypotheses) -> FinishedSearchHypotheses:
        """The best `count` of all of these that may be returned together; ties go to earlier parts."""
        return FinishedSearchHypotheses.in_order(*parts).some(slice(count))


class SearchHypothesisPool(SearchPool):
    """The best `width` finished hypotheses of one search.

    Args:
        width: Beams of the search, and the most the pool holds.
        length_penalty: Exponent of the length; > 0 favours longer hypotheses.
        max_length: The most tokens a hypothesis can generate.
    """

    def __init__(self, width: int, length_penalty: float, max_length: int) -> None:
        self.width = width
        self.length_penalty = length_penalty
        self.max_length = max_length
        self._finished = NO_FINISHED
        self.is_full = False  # there are `width`

    @property
    def worst(self) -> float:
        """The score of the worst one; there must be one."""
        return float(self._finished.scores[-1])

    def score(self, sum_logprobs: float, length: int, last_token: int) -> float:
        """What one hypothesis competes by, see `scores`."""
        return float(self.scores(np.array([sum_logprobs]), length, np.array([last_token]))[0])

    def is_done(self, best_running: float, length: int) -> bool:
        """Whether no running beam may enter the pool any more: by default, as it is full, and none can be better.

        Args:
            best_running: Cumulative log-probability of the best running beam.
            length: Tokens the running beams have generated.
        """
        return self.is_full and self.bound(best_running, length) <= self.worst

    def bound(self, sum_logprobs: float, length: int) -> float:
        """The most that what descends from a running beam can compete by.

        Sums rise by boosts alone. Below 0 the best that can come is as long, or as short, as possible; above it is the
        other of both.
        """
        num_left = self.max_length - length
        most = sum_logprobs + (self.most_boost * num_left if num_left else 0.0)
        return self.score(most, self.max_length if (self.length_penalty > 0) == (most < 0) else length, NO_TOKEN)

    def is_decided(self, best_running: float, length: int) -> bool:
        """Whether no running beam can beat the best of a pool that is not empty: of equal ones the earlier is better.

        Args:
            best_running, length: As for `is_done`.
        """
        return self.bound(best_running, length) <= float(self._finished.scores[0])

    def add(self, ended: EndedSearchHypotheses, length: int) -> np.ndarray:
        """Offer hypotheses of equal length. Returns the leaves of what has no place in the pool (any more)."""
        offered = FinishedSearchHypotheses(self.scores(ended.sums, length, ended.last_tokens), ended.leaves)
        outdone = self._keep_best(FinishedSearchHypotheses.in_order(self._finished, offered))
        self.is_full = len(self._finished.leaves) == self.width
        return outdone

    def _keep_best(self, hypotheses: FinishedSearchHypotheses) -> np.ndarray:
        """Let the best of all that there are, in order, be the pool. Returns the leaves of the others."""
        self._finished = hypotheses.some(slice(self.width))
        return hypotheses.leaves[self.width :]

    def advance(self, ended: EndedSearchHypotheses, running: np.ndarray, length: int) -> tuple[np.ndarray, bool]:
        outdone, best = ended.leaves, float(running.max())
        if len(outdone):
            outdone = self.add(ended, length)
        return outdone, best == -np.inf or self.is_done(best, length)

    def best(self, count: int) -> FinishedSearchHypotheses:
        return self._finished.some(slice(count))


class HfSearchPool(SearchHypothesisPool):
    """Hypotheses compete as in transformers' `generate`: by sum_logprobs / length**length_penalty.

    The stop token counts, the prompt does not. Source: transformers 5.19 `_update_finished_beams`,
    `_check_early_stop_heuristic` and `_beam_search_has_unfinished_sequences`; in float32 as there.

    Args:
        early_stopping: True: stop once the pool is full. False: stop once the best running beam, at
            its present length, cannot beat the worst of a full pool. "never": the same, but for a
            positive length penalty judge the running beam by the longest it can still become.
    """

    def __init__(self, width: int, length_penalty: float, max_length: int, early_stopping: EarlyStopping) -> None:
        super().__init__(width, length_penalty, max_length)
        self.early_stopping = early_stopping

    def scores(self, sums: np.ndarray, length: int, last_tokens: np.ndarray) -> np.ndarray:
        return (sums.astype(np.float32) / np.float32(length**self.length_penalty)).astype(np.float64)

    def is_done(self, best_running: float, length: int) -> bool:
        if not self.is_full:
            return False
        if self.early_stopping is True:
            return True
        if self.early_stopping == "never":
            return self.bound(best_running, length) <= self.worst
        return self.score(best_running, length, NO_TOKEN) <= self.worst


class TridecodeSearchPool(SearchHypothesisPool):
    """Hypotheses compete by sum_logprobs / length**length_penalty, the stop token counted, the prompt not.

    The search goes on for one step after the one in which `width` of them are finished. (The published
    code divides by the length, penalty 1, and keeps all of them; those beyond the best `width` are
    never returned.) Source: Efficient Beam Search for LLMs Using Trie-Based Decoding, published code.
    """

    _full_at: int | None = None  # length at which `width` hypotheses were finished

    def scores(self, sums: np.ndarray, length: int, last_tokens: np.ndarray) -> np.ndarray:
        return sums / length**self.length_penalty

    def add(self, ended: EndedSearchHypotheses, length: int) -> np.ndarray:
        outdone = super().add(ended, length)
        if self._full_at is None and self.is_full:
            self._full_at = length
        return outdone

    def is_done(self, best_running: float, length: int) -> bool:
        return self._full_at is not None and length > self._full_at


class StochasticSearchPool(SearchHypothesisPool):
    """Hypotheses compete by their log-probabilities with noise, whatever their lengths: they are drawn.

    A running beam has the noise of the best hypothesis that it leads to. Source: Kool et al. 2019, Stochastic Beams and
    Where to Find Them.
    """

    def scores(self, sums: np.ndarray, length: int, last_tokens: np.ndarray) -> np.ndarray:
        return sums


class VllmSearchPool(SearchHypothesisPool):
    """Hypotheses compete as in vLLM's `LLM.beam_search`.

    In 0.32 by sum_logprobs / (prompt + generated tokens)**length_penalty, a stop token in the end, even an
    ignored EOS, not counted; in 0.33 by sum_logprobs / (generated tokens)**length_penalty. Source: their
    `get_beam_search_score`. vLLM always goes on to the greatest length; this search ends once nothing running
    can enter the pool, with the same result.

    Args:
        prompt_length: Tokens of the prompt that count: none in 0.33.
        uncounted: Tokens that do not count in the end of a hypothesis: none in 0.33.
    """

    def __init__(
        self, width: int, length_penalty: float, max_length: int, prompt_length: int, uncounted: frozenset[int]
    ) -> None:
        super().__init__(width, length_penalty, max_length)
        self.prompt_length = prompt_length
        self._uncounted = uncounted

    def scores(self, sums: np.ndarray, length: int, last_tokens: np.ndarray) -> np.ndarray:
        counted = self.prompt_length + length
        all_count, all_but_the_last = (sums / max(n, 1) ** self.length_penalty for n in (counted, counted - 1))
        return np.where(are_search_tokens_among(last_tokens, self._uncounted), all_but_the_last, all_count)
