"""Beams where tokens come in and tokens go out, and where prompts become such tokens."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from benchmarks.server import Server
from tests.support.served import PROMPTS, beams, complete
from vllm_trie import Trace

pytestmark = pytest.mark.slow


def generate(server: Server, asked: dict[str, Any], **fields: Any) -> httpx.Response:
    return server.http.post("/inference/v1/generate", json={**asked, **fields})


def render(server: Server, **options: Any) -> dict[str, Any]:
    """What `complete` would search, as a request for tokens."""
    body = {"model": "target", "prompt": PROMPTS[0], "max_tokens": 16, **options}
    (request,) = server.http.post("/v1/completions/render", json=body).raise_for_status().json()
    return request


def test_what_a_prompt_renders_to_is_searched_as_the_prompt_is(server: Server) -> None:
    options = {"n": 3, "stop": ["return"], **beams(6, length_penalty=0.0)}
    expected = [(c.token_ids, c.finish_reason) for c in complete(server, return_token_ids=True, **options).choices]
    asked = render(server, **options)
    assert "trie_beam" not in json.dumps(asked)
    answer = generate(server, asked).json()
    assert [(c["token_ids"], c["finish_reason"]) for c in answer["choices"]] == expected
    assert answer["usage"]["completion_tokens"] == sum(len(tokens) for tokens, _ in expected)


def test_arrays_and_traces_come_with_the_whole_answer(server: Server) -> None:
    asked = render(server, **beams(4, compact=1, trace=1))
    answer = generate(server, asked).json()
    found = answer["kv_transfer_params"]["trie_beam"]
    assert found["token_ids"][0] == answer["choices"][0]["token_ids"]
    trace = Trace.of(answer)
    assert [trace.hypothesis(number) for number in trace.returned] == found["token_ids"]
    by_sglangs_names = generate(server, render(server, n=2, **beams(4, beam_results=1))).json()
    results = by_sglangs_names["kv_transfer_params"]["trie_beam"]["beam_results"]
    assert [one["output_ids"] for one in results] == [c["token_ids"] for c in by_sglangs_names["choices"]]


@pytest.mark.parametrize("name", ["compact", "trace", "beam_results"])
def test_what_chunks_have_no_place_for_is_refused_before_any_work(server: Server, name: str) -> None:
    answer = generate(server, render(server, **beams(4, **{name: 1})), stream=True)
    assert answer.status_code == 400
    assert f"{name}=1 is not supported in a stream here; leave stream out" in answer.json()["error"]["message"]


def test_a_stream_has_the_tokens_of_the_answer_or_is_a_refusal(server: Server) -> None:
    asked = render(server, **beams(3))
    events = [line.removeprefix("data: ") for line in generate(server, asked, stream=True).text.splitlines() if line]
    assert events.pop() == "[DONE]"
    parts = [json.loads(event)["choices"][0] for event in events]
    (whole,) = generate(server, asked).json()["choices"]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    assert parts[-1]["finish_reason"] == whole["finish_reason"]
    for stream in (False, True):
        refusal = generate(server, render(server, **beams(65)), stream=stream)
        assert refusal.status_code == 400
        assert "beam_width=65 exceeds max_num_seqs=64; lower it" in refusal.json()["error"]["message"]
