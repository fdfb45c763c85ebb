"""The answer of a search by steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.logprobs import Logprob, create_sample_logprobs

from vllm_trie.step_search.hypotheses import StepHypothesis
from vllm_trie.step_search.request import StepRequest
from vllm_trie.step_search.sampled_steps import Note


@pytest.mark.parametrize("is_flat", [False, True])
def test_log_probabilities_of_steps_are_joined_in_the_container_of_the_request(is_flat: bool) -> None:
    positions: list[Any] = [{token: Logprob(-float(token), 1, str(token))} for token in (1, 2, 3)]
    first, second, whole = (create_sample_logprobs(is_flat) for _ in range(3))
    for container, held in (first, positions[:2]), (second, positions[2:]), (whole, positions):
        container.extend(held)
    hypothesis = StepHypothesis(("ab", "c"), (1, 2, 3), (0.5, 1.0), notes=(Note("x", first), Note("y", second)))
    request: Any = SimpleNamespace(params=SamplingParams(logprobs=1, flat_logprobs=is_flat))
    answered = StepRequest._completion(request, 0, hypothesis).logprobs
    assert (type(answered), answered) == (type(whole), whole)
    assert len(first) == 2, "a step's own are left as they are"
