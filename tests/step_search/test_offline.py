"""How a scorer is asked for several searches at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_trie.step_search.offline import _scored_step_searches
from vllm_trie.step_search.scores import ScorerError, UnreachableScorerError


class FailingScorer:
    """A scorer that fails, each time it is asked, until `num_failures` of them are over."""

    def __init__(self, failure: Exception, num_failures: int) -> None:
        self.failure, self.num_failures, self.asked = failure, num_failures, list[int]()

    def __call__(self, candidates: list[Any]) -> list[float]:
        self.asked.append(len(candidates))
        if len(self.asked) <= self.num_failures:
            raise self.failure
        return [1.0] * len(candidates)


def scores_of_four_searches(scorer: FailingScorer) -> list[Any]:
    """Of four searches of two candidates each."""
    request = SimpleNamespace(scorer=scorer, beam=SimpleNamespace(scorer="http://host/prm"))
    asking: Any = [(SimpleNamespace(request=request), [object(), object()]) for _ in range(4)]
    return [scores for _, scores in _scored_step_searches(asking)]


FAILED, UNREACHABLE = ScorerError("answered 500"), UnreachableScorerError("cannot be reached")


@pytest.mark.parametrize(
    ("failure", "num_failures", "asked"),
    [
        (FAILED, 0, [8]),
        (FAILED, 9, [8, 2, 2, 2, 2]),
        (UNREACHABLE, 9, [8, 2]),
        (UNREACHABLE, 1, [8, 2, 2, 2, 2]),
        (UNREACHABLE, 3, [8, 2]),
    ],
)
def test_an_endpoint_that_does_not_answer_is_not_waited_for_by_every_search(
    failure: Exception, num_failures: int, asked: list[int]
) -> None:
    scorer = FailingScorer(failure, num_failures)
    scores = scores_of_four_searches(scorer)
    assert scorer.asked == asked
    assert scores == ([failure] * 4 if num_failures > 1 else [[1.0, 1.0]] * 4)
