"""Beams of the endpoints for responses and messages are those of completions and chats."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.server import Server
from tests.support.served import PROMPTS, beams, chat, complete
from vllm_trie import Trace

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("length_penalty", [1.0, 0.0])
def test_responses_and_messages_are_completions_and_chats(server: Server, length_penalty: float) -> None:
    options = beams(8, length_penalty=length_penalty)
    by_completion, by_chat = complete(server, n=1, **options), chat(server, n=1, extra_body=options)
    asked: dict[str, Any] = {"model": "target", "input": PROMPTS[0], "max_output_tokens": 16, "extra_body": options}
    assert server.client.responses.create(**asked).output_text == by_completion.choices[0].text
    events = server.client.responses.create(**asked, stream=True)
    parts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(parts) == by_completion.choices[0].text
    message = {"model": "target", "messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 12, **options}
    answer: Any = server.client.post("/messages", body=message, cast_to=object)
    assert [part["text"] for part in answer["content"]] == [by_chat.choices[0].message.content]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["responses", "messages"])
def test_responses_and_messages_refuse_as_completions_do(server: Server, path: str, stream: bool) -> None:
    asked = {"model": "target", "input": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    answer = server.http.post(f"/v1/{path}", json={**asked, "stream": stream, **beams(10000)})
    assert "beam_width=10000 exceeds max_num_seqs=64; lower it, or raise --max-num-seqs" in answer.text
    is_event = path == "messages" and stream and answer.text.startswith("event: error")  # as vLLM 0.33 has it
    assert answer.status_code == 400 or is_event


def test_messages_that_cannot_come_in_parts_are_refused_as_a_stream(server: Server) -> None:
    asked = {"model": "target", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, **beams(4, compact=1)}
    answer = server.http.post("/v1/messages", json={**asked, "stream": True})
    assert (answer.status_code, "leave stream out" in answer.text) == (400, True)
    whole = server.http.post("/v1/messages", json=asked).json()
    assert len(whole["kv_transfer_params"]["trie_beam"]["token_ids"]) == 4
    traced = server.http.post("/v1/messages", json={**asked, **beams(4, trace=1)}).json()
    assert len(Trace.of(traced).returned) == 1
