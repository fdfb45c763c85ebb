"""When a search is over, and what it returns: the pool of finished hypotheses, by `semantics`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

EarlyStopping = bool | Literal["never"]
NO_TOKEN = -1


def are_search_tokens_among(tokens: np.ndarray, some: frozenset[int]) -> np.ndarray:
    """[n] bool: which of a few tokens are in `some`, which may have as many as the vocabulary."""
    return np.array([token in some for token in tokens.tolist()], np.bool_)


class FinishedSearchHypotheses(NamedTuple):
    """Finished hypotheses, best first; ties in order of arrival."""

    scores: np.ndarray  # [n] float64, what they compete by
    leaves: np.ndarray  # [n] int64, their numbers in the hypothesis trie

    @classmethod
    def in_order(cls, *parts: FinishedSearchHypotheses) -> FinishedSearchHypotheses:
        """All hypotheses of these parts, the best first; ties by part, then by position."""
        scores, leaves = (np.concatenate(fields) for fields in zip(*parts, strict=True))
        order = np.argsort(-scores, kind="stable")
        return cls(scores[order], leaves[order])

    def some(self, which: slice | np.ndarray) -> FinishedSearchHypotheses:
        """A subset of the hypotheses."""
        return FinishedSearchHypotheses(self.scores[which], self.leaves[which])


class EndedSearchHypotheses(NamedTuple):
    """Hypotheses that end in the same step."""

    sums: np.ndarray  # [n] float64, cumulative log-probabilities
    last_tokens: np.ndarray  # [n] integers
    leaves: np.ndarray  # [n] int64, in the hypothesis trie
    rows: np.ndarray  # [n] integers, the beams that they continue

    @classmethod
    def of(cls, sums: ArrayLike, last_tokens: ArrayLike, leaves: ArrayLike, rows: ArrayLike) -> EndedSearchHypotheses:
        """Makes arrays from sequences of numbers."""
        return cls(np.array(sums, np.float64), *(np.array(field, np.int64) for field in (last_tokens, leaves, rows)))

    def some(self, which: np.ndarray) -> EndedSearchHypotheses:
        """The hypotheses where `which` [n] is true."""
        return EndedSearchHypotheses._make(field[which] for field in self)


NO_FINISHED = FinishedSearchHypotheses(np.zeros(0), np.zeros(0, np.int64))
NO_ENDED = EndedSearchHypotheses.of([], [], [], [])


class SearchPool(ABC):
    """Where finished hypotheses compete, which also decides when the search is over."""

    done: tuple[int, ...] = ()  # the groups of beams that are done
    most_boost: float = 0.0  # the most that a token can add to a score besides its log-probability; inf if unbounded

    @abstractmethod
    def advance(self, ended: EndedSearchHypotheses, running: np.ndarray, length: int) -> tuple[np.ndarray, bool]:
        """Takes in the results of one step.

        Args:
            ended: Hypotheses of `length` generated tokens.
            running: [b], cumulative log-probabilities of the beams, of the same length; -inf where there is none.

        Returns:
            The leaves of hypotheses without a place in the pool (any more), and whether no running beam can enter it
            any more.
        """

    def finishing(self, leaves: np.ndarray, ranks: np.ndarray, num_ranked: int, most: int) -> np.ndarray:
        """[n] bool: which of the hypotheses that end in a step finish: those among the best continuations.

        Args:
            leaves: [n], the best first, one group of beams after the other.
            ranks: [n], their ranks among continuations, in the same order.
            num_ranked: Continuations of each group.
            most: How many of the best of these may finish.
        """
        return ranks < most

    @abstractmethod
    def scores(self, sums: np.ndarray, length: int, last_tokens: np.ndarray) -> np.ndarray:
        """[n] float64, the scores of finished hypotheses of `length` generated tokens, the last one included.

        Args:
            sums: [n] float64, cumulative log-probabilities.
            length: Tokens of each hypothesis.
            last_tokens: [n], the last token of each hypothesis.
        """

    @abstractmethod
    def best(self, count: int) -> FinishedSearchHypotheses:
        """The best `count` finished hypotheses."""

    def best_so_far(self, count: int, running: EndedSearchHypotheses, length: int) -> FinishedSearchHypotheses:
        """The best `count` of finished hypotheses and running beams, as if these ended here; ties go to the finished.

        Args:
            running: All beams, of `length` generated tokens, as `EndedSearchHypotheses`; a sum of -inf means no beam.
        """
        beams = running.some(running.sums > -np.inf)
        going_on = FinishedSearchHypotheses(self.scores(beams.sums, length, beams.last_tokens), beams.leaves)
        return self.best_of(count, self.best(count), going_on)

    def best_of(self, count: int, *parts: FinishedSearchHypotheses) -> FinishedSearchHypotheses:
        """The best `count` of all parts that may be returned together; ties go to earlier parts."""
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
        self.is_full = False  # it holds `width` hypotheses

    @property
    def worst(self) -> float:
        """The score of the worst hypothesis; the pool must not be empty."""
        return float(self._finished.scores[-1])

    def score(self, sum_logprobs: float, length: int, last_token: int) -> float:
        """The score of one hypothesis, see `scores`."""
        return float(self.scores(np.array([sum_logprobs]), length, np.array([last_token]))[0])

    def is_done(self, best_running: float, length: int) -> bool:
        """Whether no running beam can enter the pool any more: by default, if it is full and none can be better.

        Args:
            best_running: Cumulative log-probability of the best running beam.
            length: Tokens the running beams have generated.
        """
        return self.is_full and self.bound(best_running, length) <= self.worst

    def bound(self, sum_logprobs: float, length: int) -> float:
        """The highest score that any descendant of a running beam can reach.

        Only boosts raise sums. A sum below 0 scores best at the maximum length if the length penalty is positive, and
        at the present length otherwise; above 0 it is the other way round.
        """
        num_left = self.max_length - length
        most = sum_logprobs + (self.most_boost * num_left if num_left else 0.0)
        return self.score(most, self.max_length if (self.length_penalty > 0) == (most < 0) else length, NO_TOKEN)

    def is_decided(self, best_running: float, length: int) -> bool:
        """Whether no running beam can beat the best of a pool that is not empty; ties go to the earlier hypothesis.

        Args:
            best_running, length: As for `is_done`.
        """
        return self.bound(best_running, length) <= float(self._finished.scores[0])

    def add(self, ended: EndedSearchHypotheses, length: int) -> np.ndarray:
        """Offers hypotheses of equal length. Returns the leaves of those without a place in the pool (any more)."""
        offered = FinishedSearchHypotheses(self.scores(ended.sums, length, ended.last_tokens), ended.leaves)
        outdone = self._keep_best(FinishedSearchHypotheses.in_order(self._finished, offered))
        self.is_full = len(self._finished.leaves) == self.width
        return outdone

    def _keep_best(self, hypotheses: FinishedSearchHypotheses) -> np.ndarray:
        """Keeps the best of `hypotheses`, given in order, as the pool. Returns the leaves of the others."""
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
    `_check_early_stop_heuristic` and `_beam_search_has_unfinished_sequences`; in float32 as in transformers.

    Args:
        early_stopping: True: stop once the pool is full. False: stop once the best running beam, at
            its present length, cannot beat the worst of a full pool. "never": as False, but with a
            positive length penalty, judge the running beam at the greatest length it can reach.
    """

    def __init__(self, width: int, length_penalty: float, max_length: int, early_stopping: EarlyStopping) -> None:
        super().__init__(width, length_penalty, max_length)
        self.early_stopping = early_stopping

    def scores(self, sums: np.ndarray, length: int, last_tokens: np.ndarray) -> np.ndarray:
        return (sums.astype(np.float32) / np.float32(length**self.length_penalty)).astype(np.float64)

    def is_done(self, best_running: float, length: int) -> bool:
        if self.early_stopping == "never":
            return super().is_done(best_running, length)
        return self.is_full and (
            self.early_stopping is True or self.score(best_running, length, NO_TOKEN) <= self.worst
        )


class TridecodeSearchPool(SearchHypothesisPool):
    """Hypotheses compete by sum_logprobs / length**length_penalty; the stop token counts, the prompt does not.

    The search runs for one step after the one in which `width` of them are finished. (The published
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
    """Hypotheses compete by their log-probabilities with noise, whatever their lengths: they are sampled.

    A running beam has the noise of its best descendant. Source: Kool et al. 2019, Stochastic Beams and Where to Find
    Them.
    """

    def scores(self, sums: np.ndarray, length: int, last_tokens: np.ndarray) -> np.ndarray:
        return sums


class VllmSearchPool(SearchHypothesisPool):
    """Hypotheses compete as in vLLM's `LLM.beam_search`.

    In 0.32 by sum_logprobs / (prompt + generated tokens)**length_penalty, without counting a final stop token, even
    an ignored EOS; in 0.33 by sum_logprobs / (generated tokens)**length_penalty. Source: their
    `get_beam_search_score`. vLLM always runs to the maximum length; this search ends once nothing running can enter
    the pool, with the same result.

    Args:
        prompt_length: Tokens of the prompt that count: none in 0.33.
        uncounted: Tokens that do not count at the end of a hypothesis: none in 0.33.
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
