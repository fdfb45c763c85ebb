"""Streams the certain beginning of an answer while its search goes on; `BeamGroup` uses it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_trie.engine.hypothesis import GroupHypotheses, GroupTokenReports
from vllm_trie.search.stopping import NO_TOKEN
from vllm_trie.trie.hypotheses import HypothesisTrie, Node


class AnswerChangedError(Exception):
    """A search that restarted found a different answer than the one whose beginning was sent."""


NOTHING_NEW = GroupHypotheses(
    np.array([-1]), [[]], np.zeros(1), np.zeros(1), np.array([NO_TOKEN]), np.zeros(1, np.bool_)
)


class EngineAnswerPart(NamedTuple):
    """Tokens of an answer that are sent together."""

    token_ids: list[int]
    sum_logprobs: float  # of these tokens
    reports: GroupTokenReports | None  # if log-probabilities are returned


class EngineAnswerStream:
    """The part of a search's only answer that was sent: a prefix of whatever the search may still return.

    Args:
        reports: Whether log-probabilities are returned.
    """

    def __init__(self, reports: bool) -> None:
        self._reports = reports
        self._sent: list[int] = []
        self._sum = 0.0  # of the log-probabilities of the sent tokens
        self.restart()

    def restart(self) -> None:
        """Begin again with a new trie. What was sent remains sent."""
        self.length = 0  # tokens common to all hypotheses of the present trie, checked against what was sent
        self.is_decided = False  # no beam can beat the best finished hypothesis any more: it is the answer

    def extend(self, hypotheses: HypothesisTrie, node: Node | None) -> EngineAnswerPart | None:
        """Send the tokens up to `node`. Returns those not sent before, if any.

        Args:
            node: Of the trie; continues the common prefix of `length` tokens. None if nothing is new.

        Raises:
            AnswerChangedError: other tokens were sent.
        """
        if node is None or node.length == self.length:
            return None
        start, tokens = self.length, hypotheses.tokens_between(self.length, node)
        num_known = self._check(start, tokens)
        self.length = node.length
        if num_known == len(tokens):
            return None
        reports = GroupTokenReports(*hypotheses.notes_between(start + num_known, node)) if self._reports else None
        before, self._sum = self._sum, hypotheses.score_at(node)
        self._sent += tokens[num_known:]
        return EngineAnswerPart(tokens[num_known:], self._sum - before, reports)

    def rest(self, answer: GroupHypotheses) -> GroupHypotheses:
        """The answer without its sent prefix.

        Args:
            answer: One hypothesis at most.

        Raises:
            AnswerChangedError: other tokens were sent.
        """
        if not answer:
            return answer
        count = self._check(0, answer.token_ids[0])
        if count < len(self._sent):
            raise _engine_answer_changed()
        return answer.after(count, self._sum)

    def rest_so_far(self, answer: GroupHypotheses) -> GroupHypotheses:
        """The unsent rest of the answer of an aborted search; empty if a restarted search has not found as much again.

        Args:
            answer: The best hypothesis since the search began or restarted, if any.
        """
        try:
            return self.rest(answer) if answer else NOTHING_NEW
        except AnswerChangedError:
            return NOTHING_NEW

    def _check(self, start: int, tokens: list[int]) -> int:
        """How many of `tokens`, which follow the first `start` tokens, were sent; refuses a mismatch."""
        known = self._sent[start : start + len(tokens)]
        if tokens[: len(known)] != known:
            raise _engine_answer_changed()
        return len(known)


def _engine_answer_changed() -> AnswerChangedError:
    return AnswerChangedError(
        "after a preemption this search found another answer, by a near-tie, than the one whose beginning was sent; "
        "send the request again without stream=true, or give the KV cache more memory"
    )
