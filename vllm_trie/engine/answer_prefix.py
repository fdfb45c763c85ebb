"""The beginning of an answer, sent while its search goes on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_trie.engine.hypothesis import GroupHypotheses, GroupTokenReports
from vllm_trie.search.stopping import NO_TOKEN
from vllm_trie.trie.hypotheses import HypothesisTrie, Node


class AnswerChangedError(Exception):
    """A search that began anew does not find what was sent of its answer."""


NOTHING_NEW = GroupHypotheses(
    np.array([-1]), [[]], np.zeros(1), np.zeros(1), np.array([NO_TOKEN]), np.zeros(1, np.bool_)
)


class EngineAnswerPart(NamedTuple):
    """Tokens of an answer, as they are sent."""

    token_ids: list[int]
    sum_logprobs: float  # of these
    reports: GroupTokenReports | None  # if log-probabilities are returned


class EngineAnswerStream:
    """What has been sent of the one answer of a search: a prefix of whatever the search may still return.

    Args:
        reports: Whether log-probabilities are returned.
    """

    def __init__(self, reports: bool) -> None:
        self._reports = reports
        self._sent: list[int] = []
        self._sum = 0.0  # of their log-probabilities
        self.restart()

    def restart(self) -> None:
        """The search begins anew, with a new trie. What was sent remains sent."""
        self.length = 0  # tokens of the present trie that all have in common, and that agree with what is sent
        self.is_decided = False  # the best finished hypothesis is the answer, and these are all but its end

    def extend(self, hypotheses: HypothesisTrie, node: Node | None) -> EngineAnswerPart | None:
        """Send what leads to `node`. Returns what of it is new, if anything.

        Args:
            node: Of the trie; its first `length` tokens are those that all had in common before. None: nothing new.

        Raises:
            AnswerChangedError: something else was sent already.
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
        """The answer without what has been sent of it.

        Args:
            answer: One hypothesis at most.

        Raises:
            AnswerChangedError: something else was sent.
        """
        if not answer:
            return answer
        count = self._check(0, answer.token_ids[0])
        if count < len(self._sent):
            raise _engine_answer_changed()
        return answer.after(count, self._sum)

    def rest_so_far(self, answer: GroupHypotheses) -> GroupHypotheses:
        """What is not sent yet of the answer of a search that was aborted: nothing, if it found less than that again.

        Args:
            answer: The best that it has found since it began, or began anew, if anything.
        """
        try:
            return self.rest(answer) if answer else NOTHING_NEW
        except AnswerChangedError:
            return NOTHING_NEW

    def _check(self, start: int, tokens: list[int]) -> int:
        """How many of the tokens that follow the first `start` have been sent already."""
        known = self._sent[start : start + len(tokens)]
        if tokens[: len(known)] != known:
            raise _engine_answer_changed()
        return len(known)


def _engine_answer_changed() -> AnswerChangedError:
    return AnswerChangedError(
        "after a preemption this search found another answer, by a near-tie, than the one whose beginning was sent; "
        "send the request again without stream=true, or give the KV cache more memory"
    )
