"""When a search is over, and what it returns: the pool of finished hypotheses.

Source: transformers 5.19 `_update_finished_beams`, `_check_early_stop_heuristic` and
`_beam_search_has_unfinished_sequences`; scores in float32 as there.
"""

from __future__ import annotations

from bisect import insort
from typing import Literal, NamedTuple

import numpy as np

EarlyStopping = bool | Literal["never"]


class StopRules(NamedTuple):
    """What ends a single hypothesis."""

    stop_token_ids: tuple[int, ...]  # EOS, unless ignored, among them
    eos_token_id: int | None
    min_length: int  # generated tokens it must have before it may end in a stop token
    max_length: int  # generated tokens at which it ends in any case


class Finished(NamedTuple):
    """One finished hypothesis."""

    score: np.float32  # sum_logprobs / length**length_penalty
    sum_logprobs: float
    length: int  # generated tokens, the stop token counted, the prompt not
    node: int  # its last token in the hypothesis trie


class HypothesisPool:
    """The best `width` finished hypotheses of one search.

    Args:
        width: Beams of the search, and the most the pool holds.
        length_penalty: Exponent of the length; > 0 favours longer hypotheses.
        early_stopping: True: stop once the pool is full. False: stop once the best running beam, at
            its present length, cannot beat the worst of a full pool. "never": the same, but for a
            positive length penalty judge the running beam by the longest it can still become.
        max_length: The most tokens a hypothesis can have.
    """

    def __init__(self, width: int, length_penalty: float, early_stopping: EarlyStopping, max_length: int) -> None:
        self.width = width
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.max_length = max_length
        self._best_first: list[Finished] = []

    def __len__(self) -> int:
        return len(self._best_first)

    def score(self, sum_logprobs: float, length: int) -> np.float32:
        """sum_logprobs / length**length_penalty."""
        return np.float32(np.float32(sum_logprobs) / np.float32(length**self.length_penalty))

    def add(self, sum_logprobs: float, length: int, node: int) -> int | None:
        """Offer one hypothesis. Returns the node that has no place in the pool (any more), if any."""
        finished = Finished(self.score(sum_logprobs, length), sum_logprobs, length, node)
        insort(self._best_first, finished, key=lambda f: -f.score)
        return self._best_first.pop().node if len(self._best_first) > self.width else None

    def is_settled(self, best_running: float, length: int) -> bool:
        """Whether no running beam may enter the pool any more.

        Args:
            best_running: Cumulative log-probability of the best running beam.
            length: Tokens the running beams have generated.
        """
        if len(self) < self.width:
            return False
        if self.early_stopping is True:
            return True
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.max_length
        return bool(self.score(best_running, length) <= self._best_first[-1].score)

    def best(self, count: int) -> list[Finished]:
        """The best `count`, best first; ties go to the earlier one."""
        return self._best_first[:count]
