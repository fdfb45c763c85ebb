"""What fields of requests become, with beams and without."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from tests.support.served import beams
from vllm_trie.compat.patch import wrap_all
from vllm_trie.entrypoints.requests import BeamRequestError


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        (CompletionRequest, {"prompt": "x"}),
        (ChatCompletionRequest, {"messages": []}),
        (ResponsesRequest, {"input": "x"}),
    ],
)
def test_what_the_request_says_of_sampling_counts_and_served_defaults_do_not(kind: type, asked: dict[str, Any]) -> None:
    wrap_all("vllm_trie.entrypoints.server")
    served = {"temperature": 0.3, "top_p": 0.5, "repetition_penalty": 1.5, "stop_token_ids": [7]}
    with_beams = kind(**asked, **beams(4)).to_sampling_params(8, served)
    assert (with_beams.temperature, with_beams.top_p, with_beams.repetition_penalty) == (1.0, 1.0, 1.0)
    if kind is not ResponsesRequest:  # where vLLM takes those of the request alone
        assert with_beams.stop_token_ids == [7]
    own = kind(**asked, temperature=0.7, top_k=9, seed=3, **beams(4, sample_first=2)).to_sampling_params(8, served)
    assert (own.temperature, own.top_k, own.seed, own.top_p) == (0.7, 9, 3, 1.0)
    without = kind(**asked).to_sampling_params(8, served)
    assert (without.temperature, without.top_p, without.repetition_penalty) == (0.3, 0.5, 1.5)


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_fields_by_names_of_other_systems_are_refused_beside_beams_and_left_alone_otherwise(kind: type) -> None:
    wrap_all("vllm_trie.entrypoints.server")
    asked: dict[str, Any] = {"prompt": "x"} if kind is CompletionRequest else {"messages": []}
    others = {"num_beams": 4, "best_of": 2, "early_stopping": True}
    assert kind(**asked, **others).to_sampling_params(8, {}).n == 1
    assert kind(**asked, num_beams=None, **beams(4)).to_sampling_params(8, {}).extra_args["beam_width"] == 4
    assert kind(**asked, best_of=1, **beams(4)).to_sampling_params(8, {}).n == 1  # as benchmarks send it
    for name, value in others.items():
        with pytest.raises(BeamRequestError, match=f"{name}="):
            kind(**asked, **{name: value}, **beams(4)).to_sampling_params(8, {})
        with pytest.raises(BeamRequestError, match=f"{name}="):
            kind(**asked, **{name: value}, use_beam_search=True).to_beam_search_params(8, {})
