"""When a search is over, and what it returns: the pool of finished hypotheses, by `semantics`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from typing import Literal, NamedTuple

import numpy as np

EarlyStopping = bool | Literal["never"]


class StopRules(NamedTuple):
    """What ends a single hypothesis."""

    stop_token_ids: tuple[int, ...]  # EOS, unless ignored, among them
    eos_token_id: int | None  # ignored or not
    stop_strings: tuple[str, ...]
    min_length: int  # generated tokens it must have before it may stop
    max_length: int  # generated tokens at which it ends in any case


class Finished(NamedTuple):
    """One finished hypothesis."""

    score: float  # what hypotheses compete by
    node: int  # its last token in the hypothesis trie


class HypothesisPool(ABC):
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
        self._best_first: list[Finished] = []

    def __len__(self) -> int:
        return len(self._best_first)

    @abstractmethod
    def score(self, sum_logprobs: float, length: int, last_token: int) -> float:
        """What a finished hypothesis of `length` generated tokens, the last one counted, competes by."""

    @abstractmethod
    def is_done(self, best_running: float, length: int) -> bool:
        """Whether no running beam may enter the pool any more.

        Args:
            best_running: Cumulative log-probability of the best running beam.
            length: Tokens the running beams have generated.
        """

    def add(self, sum_logprobs: float, length: int, last_token: int, node: int) -> int | None:
        """Offer one hypothesis. Returns the node that has no place in the pool (any more), if any."""
        insort(self._best_first, Finished(self.score(sum_logprobs, length, last_token), node), key=lambda f: -f.score)
        return self._best_first.pop().node if len(self._best_first) > self.width else None

    def best(self, count: int) -> list[Finished]:
        """The best `count`, best first; ties go to the earlier one."""
        return self._best_first[:count]


class HfPool(HypothesisPool):
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

    def score(self, sum_logprobs: float, length: int, last_token: int = -1) -> float:
        return float(np.float32(sum_logprobs) / np.float32(length**self.length_penalty))

    def is_done(self, best_running: float, length: int) -> bool:
        if len(self) < self.width:
            return False
        if self.early_stopping is True:
            return True
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.max_length
        return self.score(best_running, length) <= self._best_first[-1].score


class TridecodePool(HypothesisPool):
    """Hypotheses compete by sum_logprobs / length**length_penalty, the stop token counted, the prompt not.

    The search goes on for one step after the one in which `width` of them are finished. (The published
    code divides by the length, penalty 1, and keeps all of them; those beyond the best `width` are
    never returned.) Source: Efficient Beam Search for LLMs Using Trie-Based Decoding, published code.
    """

    _full_at: int | None = None  # length at which `width` hypotheses were finished

    def score(self, sum_logprobs: float, length: int, last_token: int = -1) -> float:
        return float(sum_logprobs / length**self.length_penalty)

    def add(self, sum_logprobs: float, length: int, last_token: int, node: int) -> int | None:
        outdone = super().add(sum_logprobs, length, last_token, node)
        if self._full_at is None and len(self) == self.width:
            self._full_at = length
        return outdone

    def is_done(self, best_running: float, length: int) -> bool:
        return self._full_at is not None and length > self._full_at


class VllmPool(HypothesisPool):
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
        self.uncounted = uncounted

    def score(self, sum_logprobs: float, length: int, last_token: int) -> float:
        counted = self.prompt_length + length - (last_token in self.uncounted)
        return self._over(sum_logprobs, counted)

    def is_done(self, best_running: float, length: int) -> bool:
        if len(self) < self.width:
            return False
        # Sums only fall, and are negative: the best that can come is as long, or as short, as possible.
        generated = self.max_length if self.length_penalty > 0 else length
        return self._over(best_running, self.prompt_length + generated) <= self._best_first[-1].score

    def _over(self, sum_logprobs: float, counted: int) -> float:
        return float(sum_logprobs / max(counted, 1) ** self.length_penalty)
