"""Streams of beams over HTTP: one answer in parts, as it becomes known; several when their search is over."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from benchmarks.common import TARGET
from benchmarks.server import VLLM, Server
from tests.support import forks
from tests.support.grammars import SCHEMA
from tests.support.served import BOTH_WAYS, PROMPTS, abort_by, beams, chat, complete
from vllm_trie.messages import NO_HYPOTHESIS

pytestmark = pytest.mark.slow

MOST_TRIES = 5  # what becomes known while a busy machine has not sent the part before comes with it
ONE_ANSWER = pytest.mark.parametrize(
    "options",
    [
        beams(2),
        pytest.param(beams(4, length_penalty=0, early_stopping="never"), marks=pytest.mark.nightly),
        pytest.param(beams(3, do_sample=1) | {"seed": 5}, marks=pytest.mark.nightly),
        pytest.param({"use_beam_search": True}, marks=pytest.mark.nightly),
        pytest.param({"use_beam_search": True, **beams(3)}, marks=pytest.mark.nightly),
        {"use_beam_search": True, "include_stop_str_in_output": True, **beams(2)},
    ],
    ids=lambda options: "-".join(map(str, options)),
)


@ONE_ANSWER
def test_the_parts_of_an_answer_make_the_whole(server: Server, options: dict[str, Any]) -> None:
    num_parts = []
    for number, prompt in enumerate(PROMPTS):
        more = {"echo": True} if number == 1 else {"logprobs": 2}  # beams echo no log-probabilities
        asked = {"return_token_ids": True, "stop": ["self.x", "\n\n\n"], **more, **options}
        whole = complete(server, prompt, 40, **asked)
        chunks = [*complete(server, prompt, 40, stream=True, stream_options={"include_usage": True}, **asked)]
        assert chunks[-1].usage == whole.usage
        assert len({chunk.id for chunk in chunks}) == 1
        parts, (expected,) = [chunk.choices[0] for chunk in chunks[:-1]], whole.choices
        assert "".join(part.text for part in parts) == expected.text
        assert [token for part in parts for token in part.token_ids] == expected.token_ids
        assert parts[0].prompt_token_ids == expected.prompt_token_ids
        for field in ("tokens", "token_logprobs", "text_offset", "top_logprobs") if expected.logprobs else ():
            of_parts = [value for part in parts for value in getattr(part.logprobs, field)]
            assert of_parts == getattr(expected.logprobs, field), field
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [expected.finish_reason]
        assert parts[-1].stop_reason == expected.stop_reason
        num_parts.append(len(parts))
    assert max(num_parts) > 3


@ONE_ANSWER
def test_the_parts_of_a_chat_make_the_whole(server: Server, options: dict[str, Any]) -> None:
    options = {**options}
    asked = {"seed": options.pop("seed", None), "logprobs": True, "top_logprobs": 1, "extra_body": options}
    whole = chat(server, **asked)
    streams = ([*chat(server, stream=True, stream_options={"include_usage": True}, **asked)] for _ in range(MOST_TRIES))
    chunks = next((chunks for chunks in streams if len(chunks) > 3), None)
    assert chunks is not None, "no answer came in more than two parts"
    assert chunks[-1].usage == whole.usage
    parts, (expected,) = [chunk.choices[0] for chunk in chunks[:-1]], whole.choices
    assert parts[0].delta.role == expected.message.role
    assert "".join(part.delta.content or "" for part in parts) == expected.message.content
    said = [place.token for part in parts if part.logprobs for place in part.logprobs.content]
    assert said == [place.token for place in expected.logprobs.content]
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [expected.finish_reason]


def test_several_prompts_stream_side_by_side(server: Server) -> None:
    whole = complete(server, PROMPTS, 24, **beams(2))
    texts = [""] * len(PROMPTS)
    for chunk in complete(server, PROMPTS, 24, stream=True, **beams(2)):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


@pytest.mark.parametrize("has_usage", [True, False])
def test_a_search_that_finds_nothing_says_how_it_ended(server: Server, has_usage: bool) -> None:
    """Not alone that it is done: clients wait for a finish reason."""
    word = "e"
    (token,) = AutoTokenizer.from_pretrained(TARGET).encode(word, add_special_tokens=False)
    nothing = {"allowed_token_ids": [token], "bad_words": [word], "stream": True, **beams(2)}
    if has_usage:
        nothing["stream_options"] = {"include_usage": True}
    for prompt, number in ((PROMPTS, len(PROMPTS)), (PROMPTS[0], 1), ([5, 6, 7], 1)):
        chunks = [*complete(server, prompt, **nothing)]
        ends = [(c.index, c.text, c.finish_reason, c.stop_reason) for chunk in chunks for c in chunk.choices]
        assert sorted(ends) == [(index, "", "stop", NO_HYPOTHESIS) for index in range(number)]
        assert [chunk.usage is not None for chunk in chunks] == [False] * number + [True] * has_usage
    options = {name: nothing.pop(name) for name in ("stream", "stream_options") if name in nothing}
    parts = [choice for chunk in chat(server, **options, extra_body=nothing) for choice in chunk.choices]
    assert [(part.delta.content or "", part.finish_reason) for part in parts] == [("", None), ("", "stop")]


def test_a_schema_streams_too(server: Server) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "any", "schema": SCHEMA}}
    options = {"response_format": schema, **beams(2)}
    (whole,) = complete(server, max_tokens=60, **options).choices
    parts = [chunk.choices[0] for chunk in complete(server, max_tokens=60, stream=True, **options)]
    assert "".join(part.text for part in parts) == whole.text
    assert len(parts) > 1


@pytest.mark.parametrize("tool_choice", ["auto", "none"])
def test_what_may_call_tools_comes_in_one_chunk(server: Server, tool_choice: str) -> None:
    """Calls are parsed from a whole text."""
    tools = [{"type": "function", "function": {"name": "point", "parameters": {"type": "object", "properties": {}}}}]
    asked: dict[str, Any] = {"tools": tools, "tool_choice": tool_choice, "extra_body": beams(2)}
    (whole,) = chat(server, **asked).choices
    parts = [chunk.choices[0] for chunk in chat(server, stream=True, **asked)]
    assert "".join(part.delta.content or "" for part in parts) == whole.message.content
    assert parts[-1].finish_reason == whole.finish_reason
    assert (len(parts) == 1) == (tool_choice == "auto")


def test_all_hypotheses_as_arrays_come_in_one_chunk(server: Server) -> None:
    whole = complete(server, n=1, **beams(8, compact=1)).model_dump()
    (chunk,) = complete(server, n=1, stream=True, **beams(8, compact=1))
    assert chunk.model_dump()["kv_transfer_params"] == whole["kv_transfer_params"]


@BOTH_WAYS
def test_a_stream_has_every_hypothesis_in_one_chunk(server: Server, options: dict[str, Any]) -> None:
    whole = complete(server, n=4, logprobs=1, return_token_ids=True, **options)
    asked = {"n": 4, "logprobs": 1, "return_token_ids": True, "stream": True, **options}
    chunks = [*complete(server, stream_options={"include_usage": True}, **asked)]
    assert [[c.index for c in chunk.choices] for chunk in chunks] == [[0], [1], [2], [3], []]
    assert [chunk.choices[0].model_dump() for chunk in chunks[:-1]] == [choice.model_dump() for choice in whole.choices]
    assert [chunk.usage for chunk in chunks] == [None] * 4 + [whole.usage]
    without_usage = [*complete(server, **asked)]
    assert [chunk.choices for chunk in without_usage] == [chunk.choices for chunk in chunks[:-1]]
    assert len({chunk.id for chunk in without_usage}) == 1


@BOTH_WAYS
def test_a_chat_streams_its_hypotheses_too(server: Server, options: dict[str, Any]) -> None:
    whole = chat(server, n=3, extra_body=options)
    chunks = [*chat(server, n=3, stream=True, stream_options={"include_usage": True}, extra_body=options)]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    said = [(c.index, c.delta.role, c.delta.content, c.finish_reason) for chunk in chunks for c in chunk.choices]
    assert said == [(c.index, c.message.role, c.message.content, c.finish_reason) for c in whole.choices]
    assert chunks[-1].usage == whole.usage


def test_a_stream_ends_as_the_protocol_says(server: Server) -> None:
    for n in (1, 2):
        body = {"model": "target", "prompt": "def f(", "max_tokens": 4, "n": n, "stream": True, **beams(3)}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            events = [line for line in response.iter_lines() if line]
        assert {event.partition(":")[0] for event in events} == {"data"}
        assert events[-1] == "data: [DONE]"
        assert len(events) > 1


@pytest.mark.parametrize("options", [beams(2), {"use_beam_search": True}], ids=["beam_width", "use_beam_search"])
def test_a_client_that_vanishes_within_a_stream_takes_its_search_with_it(
    server: Server, options: dict[str, Any]
) -> None:
    async def vanish() -> None:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        asked: dict[str, Any] = {"model": "target", "prompt": PROMPTS[0], "max_tokens": 480}
        slow = asyncio.create_task(client.completions.create(n=64, extra_body={"ignore_eos": True}, **asked))
        body = {"ignore_eos": True, **options}  # in steps that such company makes long
        async with await client.completions.create(stream=True, extra_body=body, **asked) as stream:
            assert (await anext(aiter(stream))).choices[0].text
        slow.cancel()

    abort_by(server, vanish)


@pytest.mark.nightly
def test_a_benchmark_sees_tokens_come(server: Server, tmp_path: Path) -> None:
    """So the time to the first token is not that of the last."""
    command = [
        *[VLLM, "bench", "serve", "--backend", "openai", "--base-url", server.url, "--model", "target"],
        *["--tokenizer", str(TARGET), "--dataset-name", "random", "--num-prompts", "3", "--num-warmups", "0"],
        *["--input-len", "20", "--output-len", "400", "--ignore-eos", "--extra-body", json.dumps(beams(2))],
        *["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "serve.json"],
    ]
    forks.run(command, seconds=300).check_returncode()
    measured = json.loads((tmp_path / "serve.json").read_text())
    assert measured["completed"] == 3
    assert measured["output_lens"] == [400] * 3
    assert any(len(of_one) > 1 for of_one in measured["itls"])  # a busy machine sends less often
