"""Beams over HTTP: the real server, the real client, next to a server without the plugin."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from benchmarks.server import Server
from tests.support.documents import CLIENT, README_CLIENT, Example, is_as_shown, run_here
from tests.support.served import PROMPTS, beams, chat, complete
from vllm_trie import Trace

pytestmark = pytest.mark.slow

EXAMPLES = [example for example in CLIENT if example != README_CLIENT]


def as_seen(response: Any) -> list[Any]:
    choices = [(c.text, c.finish_reason, c.stop_reason, c.token_ids) for c in response.choices]
    return [*choices, response.usage.model_dump()]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_an_example_of_a_client_runs(server: Server, example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(example, **{"http://localhost:8000": server.url})
    printed = capsys.readouterr().out
    assert is_as_shown(example, printed), printed


@pytest.mark.parametrize("prompt", [PROMPTS[0], pytest.param(PROMPTS[1], marks=pytest.mark.nightly)])
def test_use_beam_search_answers_as_without_the_plugin(server: Server, stock: Server, prompt: str) -> None:
    for n, length_penalty, ignore_eos, with_eos in [
        (1, 1.0, False, False),
        (2, 0.0, False, True),
        (4, 2.0, True, False),
    ]:
        ours, theirs = (
            complete(
                one,
                prompt,
                n=n,
                logprobs=1,
                use_beam_search=True,
                length_penalty=length_penalty,
                ignore_eos=ignore_eos,
                include_stop_str_in_output=with_eos,
                return_token_ids=True,
            )
            for one in (server, stock)
        )
        assert as_seen(ours) == as_seen(theirs)
        for our, their in zip(ours.choices, theirs.choices, strict=True):
            assert our.logprobs.tokens == their.logprobs.tokens
            assert our.logprobs.token_logprobs == pytest.approx(their.logprobs.token_logprobs, abs=1e-4)


@pytest.mark.nightly
def test_chat_answers_as_without_the_plugin(server: Server, stock: Server) -> None:
    ours, theirs = (chat(one, n=2, extra_body={"use_beam_search": True}) for one in (server, stock))
    assert [c.message.content for c in ours.choices] == [c.message.content for c in theirs.choices]
    assert ours.usage == theirs.usage


def test_an_echo_in_a_chat_asks_for_nothing_of_the_prompt(server: Server, stock: Server) -> None:
    messages = [{"role": "user", "content": PROMPTS[0]}, {"role": "assistant", "content": "    "}]
    asked = {"model": "target", "messages": messages, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    echoing = {"echo": True, "add_generation_prompt": False}
    ours, theirs, by_width = (
        one.client.chat.completions.create(**asked, n=2, extra_body=echoing | options)
        for one, options in (
            (server, {"use_beam_search": True}),
            (stock, {"use_beam_search": True}),
            (server, beams(2)),
        )
    )
    assert [c.message.content for c in ours.choices] == [c.message.content for c in theirs.choices]
    assert all(c.message.content.startswith("    ") for c in by_width.choices)
    streamed = server.client.chat.completions.create(**asked, extra_body=echoing | beams(2), stream=True)
    parts = [chunk.choices[0].delta.content or "" for chunk in streamed]
    assert "".join(parts) == by_width.choices[0].message.content


@pytest.mark.parametrize("echo", [False, True])
def test_no_tokens_are_one_empty_hypothesis_as_without_the_plugin(server: Server, stock: Server, echo: bool) -> None:
    asked = {"max_tokens": 0, "echo": echo, "use_beam_search": True}
    ours, theirs = (complete(one, n=3, **asked, return_token_ids=True) for one in (server, stock))
    assert as_seen(ours) == as_seen(theirs)
    for n in (1, 3):
        (chunk,) = complete(server, n=n, **asked, stream=True)
        assert (chunk.choices[0].text, chunk.choices[0].finish_reason) == (PROMPTS[0] if echo else "", "length")
    (chat_chunk,) = [
        chunk.choices[0]
        for chunk in server.client.chat.completions.create(
            model="target",
            messages=[{"role": "user", "content": PROMPTS[0]}],
            max_tokens=0,
            extra_body={"use_beam_search": True},
            stream=True,
        )
        if chunk.choices[0].finish_reason
    ]
    assert (chat_chunk.delta.content or "", chat_chunk.finish_reason) == ("", "length")


def test_a_prompt_that_leaves_no_room_is_answered_as_without_the_plugin(server: Server, stock: Server) -> None:
    ours, theirs = (complete(one, [5] * 512, n=2, use_beam_search=True) for one in (server, stock))
    assert as_seen(ours) == as_seen(theirs)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"length_penalty": 9.0}, marks=pytest.mark.nightly),
        {"length_penalty": -39.0},
        {"logprobs": -1},
        pytest.param({"logprobs": 1000}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_numbers_that_vllms_own_beams_take_are_taken(server: Server, stock: Server, options: dict[str, Any]) -> None:
    prompt = "class Foo:\n    def close(self):\n        pass\n"
    ours, theirs = (complete(one, prompt, n=4, use_beam_search=True, **options) for one in (server, stock))
    assert [c.text for c in ours.choices] == [c.text for c in theirs.choices]
    if "logprobs" in options:
        for our, their in zip(ours.choices, theirs.choices, strict=True):
            assert our.logprobs.token_logprobs == pytest.approx(their.logprobs.token_logprobs, abs=1e-4)
            assert all(len(top) >= 8 for top in our.logprobs.top_logprobs)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=str)
def test_where_there_is_no_hypothesis_no_tool_is_called(server: Server, choice: Any, stream: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    nothing = {"allowed_token_ids": [5], **beams(3)}  # which begins no call
    answer = chat(server, n=3, tools=tools, tool_choice=choice, stream=stream, extra_body=nothing)
    found = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
    assert [(c.finish_reason, c.stop_reason) for c in found] == [("stop", "no further hypothesis")] * 3
    assert not any((c.delta if stream else c.message).tool_calls for c in found)


def test_width_and_n_are_two_things(server: Server) -> None:
    one = complete(server, n=1, **beams(16), return_token_ids=True)
    three = complete(server, n=3, **beams(16, early_stopping="never"), return_token_ids=True)
    assert len(one.choices) == 1
    assert [c.index for c in three.choices] == [0, 1, 2]
    assert len({c.text for c in three.choices}) == 3
    assert three.usage.completion_tokens == sum(len(c.token_ids) for c in three.choices)
    assert three.usage.prompt_tokens == one.usage.prompt_tokens == len(one.choices[0].prompt_token_ids)
    wider = complete(server, n=1, use_beam_search=True, **beams(16, semantics="hf"))
    assert wider.choices[0].text == one.choices[0].text


def test_compact_answers_come_in_one_object(server: Server) -> None:
    options = {"min_tokens": 4, "return_token_ids": True}
    every = complete(server, n=8, **beams(8), **options)
    one = complete(server, n=1, **beams(8, compact=1), **options)
    assert one.choices[0].token_ids == every.choices[0].token_ids
    answer = one.kv_transfer_params["trie_beam"]
    assert answer["token_ids"] == [c.token_ids for c in every.choices]
    assert answer["finish_reasons"] == [c.finish_reason for c in every.choices]
    assert answer["scores"] == sorted(answer["scores"], reverse=True)
    assert len(answer["cumulative_logprobs"]) == 8
    chatted = chat(server, n=1, extra_body=beams(8, compact=1)).kv_transfer_params["trie_beam"]
    assert len(chatted["token_ids"]) == 8
    with pytest.raises(openai.BadRequestError, match="compact=1 takes one prompt, and this request has 2"):
        complete(server, PROMPTS[:2], n=1, **beams(8, compact=1))


@pytest.mark.parametrize("options", [{}, {"use_beam_search": True}, {"stream": True}], ids=str)
def test_a_trace_is_a_field_of_the_response(server: Server, options: dict[str, Any]) -> None:
    asked = {"n": 3, "return_token_ids": True, "include_stop_str_in_output": True, **options}
    plain = complete(server, n=3, return_token_ids=True, include_stop_str_in_output=True, **beams(6))
    answer = complete(server, **asked, **beams(6, trace=1, semantics="hf"))
    chunks = [*answer] if "stream" in options else [answer]
    trace = Trace.of(chunks[-1])
    found = [[*choice.token_ids] for chunk in chunks for choice in chunk.choices]
    assert [trace.hypothesis(number) for number in trace.returned] == found == [c.token_ids for c in plain.choices]
    assert trace == Trace.of(json.loads(chunks[-1].model_dump_json()))
    assert chunks[-1].model_dump().get("kv_transfer_params") is None
    assert trace.texts.keys() >= {token for tokens in trace.tokens for token in tokens}


def test_a_trace_comes_with_chats_and_beside_arrays(server: Server) -> None:
    response = chat(server, n=1, extra_body=beams(4, trace=1, compact=1))
    trace, arrays = Trace.of(response), response.kv_transfer_params["trie_beam"]
    assert [trace.hypothesis(number) for number in trace.returned] == arrays["token_ids"]
    assert "trace" not in arrays
    with pytest.raises(openai.BadRequestError, match="trace=1 takes one prompt, and this request has 2"):
        complete(server, PROMPTS[:2], n=1, **beams(4, trace=1))


@pytest.mark.parametrize(
    "options", [{"n": 3}, *({"n": n, "stream": True} for n in (1, 3)), {"n": 3, "use_beam_search": True}], ids=str
)
def test_beam_results_stand_where_clients_of_sglang_look(server: Server, options: dict[str, Any]) -> None:
    asked = {"return_token_ids": True, "include_stop_str_in_output": True, "stop": ["return"]}
    arrays = complete(server, n=1, **asked, **beams(6, compact=1)).kv_transfer_params["trie_beam"]
    answer = complete(server, **options, **asked, **beams(6, beam_results=1, semantics="hf"))
    chunks = [*answer] if "stream" in options else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    found = chunks[-1].model_dump()["meta_info"]["beam_results"]
    assert [one["text"] for one in found] == [choice.text for choice in choices]
    assert [one["output_ids"] for one in found] == arrays["token_ids"][: len(choices)]
    for one, score, logprob, choice in zip(
        found, arrays["scores"], arrays["cumulative_logprobs"], choices, strict=False
    ):
        assert one["meta_info"]["sequence_score"] == pytest.approx(score)
        assert one["meta_info"]["cumulative_logprob"] == pytest.approx(logprob)
        end = one["meta_info"]["finish_reason"]
        assert end["type"] == choice.finish_reason
        if end["type"] == "length":
            assert end["length"] == len(one["output_ids"]) == 16
        else:
            assert end["matched"] in ("return", one["output_ids"][-1])
    assert any(one["meta_info"]["finish_reason"]["type"] == "stop" for one in found)
    assert chunks[-1].model_dump().get("kv_transfer_params") is None


def test_beam_results_come_with_chats_and_of_one_prompt(server: Server) -> None:
    response = chat(server, n=2, extra_body=beams(4, beam_results=1))
    texts = [one["text"] for one in response.meta_info["beam_results"]]
    assert texts == [choice.message.content for choice in response.choices]
    with pytest.raises(openai.BadRequestError, match="beam_results=1 takes one prompt, and this request has 2"):
        complete(server, PROMPTS[:2], n=1, **beams(4, beam_results=1))


def test_what_vllms_conversion_drops_is_honoured(server: Server) -> None:
    crossing = "ing of"  # tokens end in the middle of it
    free = complete(server, n=4, use_beam_search=True)
    assert any(crossing in c.text for c in free.choices)
    stopped = complete(server, n=4, stop=[crossing], use_beam_search=True)
    assert all(crossing not in c.text for c in stopped.choices)
    assert {c.stop_reason for c in stopped.choices if c.finish_reason == "stop"} == {crossing}
    included = complete(server, n=4, stop=[crossing], use_beam_search=True, include_stop_str_in_output=True)
    assert all(c.text.endswith(crossing) for c in included.choices if c.finish_reason == "stop")
    biased = complete(server, n=2, logit_bias={"13": 60}, use_beam_search=True, return_token_ids=True)
    assert biased.choices[0].token_ids == [13] * 16
    assert any("string" in c.text for c in free.choices)
    banned = complete(server, n=4, use_beam_search=True, bad_words=["string"])
    assert all("string" not in c.text for c in banned.choices)
    freely, at_least = (
        complete(server, PROMPTS[1], n=4, use_beam_search=True, min_tokens=least, return_token_ids=True)
        for least in (0, 16)
    )
    assert any(len(c.token_ids) < 16 for c in freely.choices)
    assert all(len(c.token_ids) == 16 for c in at_least.choices)


def test_length_penalty_of_the_request_reaches_the_search(server: Server) -> None:
    prompt = "class Foo:\n    def close(self):\n        pass\n"
    short, long = (
        complete(server, prompt, 32, n=4, **beams(4), length_penalty=p, return_token_ids=True) for p in (-2.0, 4.0)
    )
    lengths = [[len(c.token_ids) for c in response.choices] for response in (short, long)]
    assert sum(lengths[0]) < sum(lengths[1])


def test_logprobs_come_for_every_token(server: Server) -> None:
    response = complete(server, n=2, logprobs=3, **beams(4))
    for choice in response.choices:
        assert len(choice.logprobs.tokens) == 16
        assert "".join(choice.logprobs.tokens) == choice.text
        for own, top in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True):
            assert 3 <= len(top) <= 4
            assert any(abs(own - logprob) < 1e-6 for logprob in top.values())
    first = chat(server, n=2, logprobs=True, top_logprobs=2, extra_body=beams(4)).choices[0]
    assert all(len(token.top_logprobs) == 2 for token in first.logprobs.content)


def test_use_beam_search_has_groups(server: Server) -> None:
    groups = {"num_beam_groups": 2, "diversity_penalty": 0.9}
    by_width = complete(server, n=4, **beams(4, **groups))
    by_n = complete(server, n=4, use_beam_search=True, vllm_xargs=groups)
    assert [choice.text for choice in by_n.choices] == [choice.text for choice in by_width.choices]


def test_a_prompt_just_below_the_limit_has_room_for_one_token(server: Server) -> None:
    assert complete(server, [5] * 511, 1, n=2, **beams(4)).usage.completion_tokens == 2


@pytest.mark.parametrize("options", [{"vllm_xargs": {"beam_width": 2}}, {"use_beam_search": True, "vllm_xargs": {}}])
def test_a_session_that_vllm_looks_for_is_no_unknown_option(server: Server, options: dict[str, Any]) -> None:
    asked = {**options, "vllm_xargs": {**options["vllm_xargs"], "session_id": "abc"}}
    assert complete(server, n=2, **asked).choices[0].text == complete(server, n=2, **options).choices[0].text


def test_phrases_come_as_a_json_text(server: Server) -> None:
    prompt, phrases = PROMPTS[0], [[" return", 6.0]]
    plain, biased = (
        complete(server, prompt, n=4, max_tokens=24, vllm_xargs={"beam_width": 4, **options})
        for options in ({}, {"phrase_boosts": json.dumps(phrases)})
    )
    num_plain, num_biased = (sum(choice.text.count("return") for choice in one.choices) for one in (plain, biased))
    assert num_biased > num_plain
    with pytest.raises(openai.BadRequestError, match="phrase_boosts='return' is not a list of 1 to 1,000 pairs"):
        complete(server, prompt, vllm_xargs={"beam_width": 4, "phrase_boosts": "return"})
