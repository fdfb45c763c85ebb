"""Beams over HTTP: the real server, the real client, next to a server without the plugin."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import httpx
import numpy as np
import openai
import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from benchmarks.common import TARGET
from benchmarks.server import Server, serving
from tests.support.engine import ROOT
from tests.support.grammars import GRAMMARS, MATCHES, SCHEMA
from tests.test_readme import CLIENT, README_CLIENT, Example, run_here
from vllm_trie.entrypoints.requests import BeamRequestError
from vllm_trie.entrypoints.server import serve_beams

pytestmark = pytest.mark.slow

EXAMPLES = [example for example in CLIENT if example != README_CLIENT]
PROMPTS = ["def is_prime(number):", "class Foo:\n    def close(self):", "import os\n", "    return"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server") / "log", "--plugin", "trie_beam") as server:
        yield server


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("stock") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two engines, each with a draft model. On 0.33 each takes a NUMA node for itself, unless this is set."""
    drafts = {"method": "draft_model", "model": str(TARGET.with_name("draft")), "num_speculative_tokens": 3}
    options = ["--data-parallel-size", "2", "--speculative-config", json.dumps(drafts)]
    with (
        mock.patch.dict("os.environ", VLLM_CPU_SIM_MULTI_NUMA="0"),
        serving(tmp_path_factory.mktemp("parallel") / "log", "--plugin", "trie_beam", *options) as server,
    ):
        yield server


def complete(server: Server, prompt: Any = PROMPTS[0], max_tokens: int = 16, **options: Any) -> Any:
    """Options that the client does not know go into the body."""
    known = {"n", "stop", "logprobs", "logit_bias", "presence_penalty", "temperature", "seed", "stream", "echo"}
    known.add("stream_options")
    extra = {name: options.pop(name) for name in list(options) if name not in known}
    return server.client.completions.create(
        model="target", prompt=prompt, max_tokens=max_tokens, extra_body=extra, **options
    )


def chat(server: Server, **options: Any) -> Any:
    messages = [{"role": "user", "content": PROMPTS[0]}]
    return server.client.chat.completions.create(model="target", messages=messages, max_tokens=12, **options)


def beams(width: int, **options: Any) -> dict[str, Any]:
    return {"vllm_xargs": {"beam_width": width, **options}}


def as_seen(response: Any) -> list[Any]:
    choices = [(c.text, c.finish_reason, c.stop_reason, c.token_ids) for c in response.choices]
    return [*choices, response.usage.model_dump()]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_an_example_of_a_client_runs(server: Server, example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(example, **{"http://localhost:8000": server.url})
    assert len(capsys.readouterr().out.splitlines()) >= 3


@pytest.mark.parametrize("prompt", PROMPTS)
def test_use_beam_search_answers_as_without_the_plugin(server: Server, stock: Server, prompt: str) -> None:
    for n, length_penalty, ignore_eos, with_eos in [
        (1, 1.0, False, False),
        (2, 0.0, False, True),
        (4, 1.0, True, False),
        (4, 2.0, False, False),
        (8, 1.0, False, True),
        (8, 0.5, True, True),
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


def test_chat_answers_as_without_the_plugin(server: Server, stock: Server) -> None:
    ours, theirs = (chat(one, n=4, extra_body={"use_beam_search": True}) for one in (server, stock))
    assert [c.message.content for c in ours.choices] == [c.message.content for c in theirs.choices]
    assert ours.usage == theirs.usage


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
    answer = httpx.post(f"{server.url}/v1/{path}", json={**asked, "stream": stream, **beams(10000)})
    assert "beam_width=10000 exceeds max_num_seqs=64; lower it, or raise --max-num-seqs" in answer.text
    is_event = path == "messages" and stream and answer.text.startswith("event: error")  # as vLLM 0.33 has it
    assert answer.status_code == 400 or is_event


def test_messages_that_cannot_come_in_parts_are_refused_as_a_stream(server: Server) -> None:
    asked = {"model": "target", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, **beams(4, compact=1)}
    answer = httpx.post(f"{server.url}/v1/messages", json={**asked, "stream": True})
    assert (answer.status_code, "leave stream out" in answer.text) == (400, True)
    whole = httpx.post(f"{server.url}/v1/messages", json=asked).json()
    assert len(whole["kv_transfer_params"]["trie_beam"]["token_ids"]) == 4


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
    banned = complete(server, n=4, use_beam_search=True, bad_words=["string"])
    assert all("string" not in c.text for c in banned.choices)
    at_least = complete(server, n=4, use_beam_search=True, min_tokens=16, return_token_ids=True)
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


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        (CompletionRequest, {"prompt": "x"}),
        (ChatCompletionRequest, {"messages": []}),
        (ResponsesRequest, {"input": "x"}),
    ],
)
def test_what_the_request_says_of_sampling_counts_and_served_defaults_do_not(kind: type, asked: dict[str, Any]) -> None:
    serve_beams()
    served = {"temperature": 0.3, "top_p": 0.5, "repetition_penalty": 1.5, "stop_token_ids": [7]}
    with_beams = kind(**asked, **beams(4)).to_sampling_params(8, served)
    assert (with_beams.temperature, with_beams.top_p, with_beams.repetition_penalty) == (1.0, 1.0, 1.0)
    if kind is not ResponsesRequest:  # where vLLM takes those of the request alone
        assert with_beams.stop_token_ids == [7]
    own = kind(**asked, temperature=0.7, top_k=9, seed=3, **beams(4, sample_first=2)).to_sampling_params(8, served)
    assert (own.temperature, own.top_k, own.seed, own.top_p) == (0.7, 9, 3, 1.0)
    without = kind(**asked).to_sampling_params(8, served)
    assert (without.temperature, without.top_p, without.repetition_penalty) == (0.3, 0.5, 1.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (beams(0), "beam_width=0 is not a whole number of beams"),
        (beams(-1), "beam_width=-1 is not a whole number of beams"),
        (beams(2.5), "beam_width=2.5 is not a whole number of beams"),
        (beams("8"), "beam_width='8' is not a whole number of beams"),
        (beams("many"), "beam_width='many' is not a whole number of beams"),
        (beams(10**6), "beam_width=1000000 exceeds max_num_seqs=64; lower it, or raise --max-num-seqs"),
        ({"use_beam_search": True, "n": 65}, "use_beam_search with n=65 exceeds max_num_seqs=64; lower it, or raise"),
        ({"use_beam_search": True, "n": 2, **beams(65)}, "beam_width=65 exceeds max_num_seqs=64; lower it, or raise"),
        ({"use_beam_search": True, "prompt_logprobs": 1}, "prompt_logprobs=1 is not supported together with use_beam"),
        (beams(4, num_beams=4), "unknown option num_beams=4; did you mean beam_width?"),
        (beams(4, best_of=4), "unknown option best_of=4; the width is how many beams are searched, n how many"),
        (
            {"use_beam_search": True, "vllm_xargs": {"diversity_penalty": 0.5}},
            "diversity_penalty=0.5 needs groups that differ; set num_beam_groups",
        ),
        (beams(4, n=2), "n=2 does nothing in vllm_xargs (extra_args); it is a field of the request"),
        (beams(4, catalog_name="items"), "unknown option catalog_name='items'; did you mean catalog"),
        (beams(4, foo=1), "unknown option foo=1; known: beam_width, "),
        (
            beams(4, catalog="x"),
            'this engine has none; start it with additional_config={"trie_beam": {"catalogs": {NAM',
        ),
        ({"echo": True, "logprobs": 1, **beams(4)}, "logprobs=1 with echo=True would tell of the prompt"),
        ({"use_beam_search": True, "vllm_xargs": {"unit": "step"}}, 'unit="step" does not work with use_beam_search'),
        ({"use_beam_search": True, "best_of": 2}, "best_of=2; the width is how many beams are searched, n how many"),
        ({"num_beams": 4, **beams(4)}, "unknown option num_beams=4; did you mean beam_width?"),
        ({"use_beam_search": True, "num_beams": 4}, "num_beams=4; did you mean beam_width?"),
        ({"use_beam_search": True, "early_stopping": True}, "early_stopping=True is no field of a request; pass it in"),
        ({"beam_width": 4}, 'beam_width=4 is no field of a request; pass it in "vllm_xargs"'),
        ({"n": 5, **beams(4)}, "n=5 exceeds beam_width=4"),
        (beams(4, length_penalty="nan"), "length_penalty='nan' is not a number above -6 and below 6"),
        ({"use_beam_search": True, "length_penalty": "nan"}, "length_penalty=nan is not a number"),
        ({"use_beam_search": True, "length_penalty": "Infinity"}, "length_penalty=inf is not a number"),
        ({"vllm_xargs": {"beam_widht": 4}}, "unknown option beam_widht=4; did you mean beam_width?"),
        ({"prompt": "", **beams(4)}, "prompt"),
        ({"prompt": [5] * 512, **beams(4)}, "max_tokens must be at least 1"),
        ({"prompt": [5] * 513, **beams(4)}, "maximum context length is 512"),
        ({"n": 2, "temperature": 0, **beams(4)}, "n must be 1 when using greedy sampling"),
        (
            {"length_penalty": 1.5, **beams(4, length_penalty=0.5)},
            "length_penalty=1.5 of the request is 0.5 in vllm_xargs; leave one of them out",
        ),
        ({"seed": 1, **beams(4)}, "seed=1 has nothing to decide in a beam search"),
        (
            {"response_format": {"type": "json_object"}, "ignore_eos": True, **beams(4)},
            "ignore_eos=True is not supported together",
        ),
        ({"stream": True, **beams(65)}, "beam_width=65 exceeds max_num_seqs=64"),
        ({"stream": True, "use_beam_search": True, "n": 65}, "use_beam_search with n=65 exceeds max_num_seqs=64"),
    ],
)
def test_a_bad_request_is_a_400_that_names_the_option(server: Server, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        complete(server, **options)
    assert message in refusal.value.message
    assert server.gauge("vllm:num_requests_running") == 0


def test_several_chats_in_one_request_have_no_beams(server: Server) -> None:
    chats = {"model": "target", "messages": [[{"role": "user", "content": "x"}]] * 2, "max_tokens": 4}
    where = f"{server.url}/v1/chat/completions/batch"
    assert len(httpx.post(where, json=chats).json()["choices"]) == 2
    for asked in (beams(4), {"beam_width": 4}):
        refusal = httpx.post(where, json=chats | asked)
        assert refusal.status_code == 400
        why = "beam_width does not work at /v1/chat/completions/batch; send each chat to /v1/chat/completions"
        assert why in refusal.json()["error"]["message"]


def test_use_beam_search_has_groups(server: Server) -> None:
    groups = {"num_beam_groups": 2, "diversity_penalty": 0.9}
    by_width = complete(server, n=4, **beams(4, **groups))
    by_n = complete(server, n=4, use_beam_search=True, vllm_xargs=groups)
    assert [choice.text for choice in by_n.choices] == [choice.text for choice in by_width.choices]


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_fields_by_names_of_other_systems_are_refused_beside_beams_and_left_alone_otherwise(kind: type) -> None:
    serve_beams()
    asked: dict[str, Any] = {"prompt": "x"} if kind is CompletionRequest else {"messages": []}
    others = {"num_beams": 4, "best_of": 2, "early_stopping": True}
    assert kind(**asked, **others).to_sampling_params(8, {}).n == 1
    assert kind(**asked, num_beams=None, **beams(4)).to_sampling_params(8, {}).extra_args["beam_width"] == 4
    for name, value in others.items():
        with pytest.raises(BeamRequestError, match=f"{name}="):
            kind(**asked, **{name: value}, **beams(4)).to_sampling_params(8, {})
        with pytest.raises(BeamRequestError, match=f"{name}="):
            kind(**asked, **{name: value}, use_beam_search=True).to_beam_search_params(8, {})


BOTH_WAYS = pytest.mark.parametrize(
    "options", [beams(6), {"use_beam_search": True}], ids=["beam_width", "use_beam_search"]
)


@BOTH_WAYS
def test_a_schema_is_followed_by_every_hypothesis(server: Server, options: dict[str, Any]) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "any", "schema": SCHEMA}}
    num_matches = 0
    kinds = [("schema", {"response_format": schema})]
    kinds += [
        (name, {"structured_outputs": GRAMMARS[name]}) for name in ("regex", "choice", "grammar", "structural tag")
    ]
    for name, constraint in kinds:
        of_text = complete(server, n=5, max_tokens=60, **constraint, **options).choices
        of_chat = chat(server, n=5, extra_body=constraint | options).choices
        texts = [(c.text, c.finish_reason) for c in of_text] + [(c.message.content, c.finish_reason) for c in of_chat]
        assert {reason for _, reason in texts} <= {"stop", "length"}
        found = [text for text, reason in texts if reason == "stop" and text]
        assert all(MATCHES[name](text) for text in found), (name, found)
        num_matches += len(found)
    assert num_matches > 15


def test_an_item_is_the_same_whoever_asks_for_it(server: Server) -> None:
    """Token by token: `use_beam_search` leaves out an EOS that ends a hypothesis, and nothing else."""
    asked = {"n": 3, "logprobs": 1, "return_token_ids": True, "max_tokens": 8}
    items = {"allowed_sequences": ["return", "raise", "yield from"]}
    by_width = complete(server, vllm_xargs={"beam_width": 3, **items}, **asked)
    by_flag = complete(server, use_beam_search=True, vllm_xargs=items, **asked)
    for one, other in zip(by_width.choices, by_flag.choices, strict=True):
        assert (one.text, one.token_ids, one.stop_reason) == (other.text, other.token_ids, other.stop_reason)
        assert one.logprobs == other.logprobs
    assert by_width.usage == by_flag.usage


def test_a_schema_that_vllm_refuses_is_a_400(server: Server) -> None:
    for options in (beams(3), {"use_beam_search": True}):
        with pytest.raises(openai.BadRequestError, match="regex"):
            complete(server, structured_outputs={"regex": "(["}, **options)


def test_a_prompt_just_below_the_limit_has_room_for_one_token(server: Server) -> None:
    assert complete(server, [5] * 511, 1, n=2, **beams(4)).usage.completion_tokens == 2


def test_our_own_marks_cannot_be_forged(server: Server) -> None:
    for forged in ({}, {"trie_beam_caller": "LLM.beam_search"}, {"trie_beam_caller": 1}):
        choice = complete(server, vllm_xargs={"beam_width": 2, **forged}).choices[0]
        assert choice.text
        assert choice.logprobs is None
    for width in ({}, {"beam_width": 2}):
        with pytest.raises(openai.BadRequestError, match="trie_beam_ticket is a mark of the front end's own"):
            complete(server, vllm_xargs={"trie_beam_ticket": "y", **width})


@pytest.mark.parametrize("options", [{"vllm_xargs": {"beam_width": 2}}, {"use_beam_search": True, "vllm_xargs": {}}])
def test_a_session_that_vllm_looks_for_is_no_unknown_option(server: Server, options: dict[str, Any]) -> None:
    asked = {**options, "vllm_xargs": {**options["vllm_xargs"], "session_id": "abc"}}
    assert complete(server, n=2, **asked).choices[0].text == complete(server, n=2, **options).choices[0].text


def test_beams_and_ordinary_requests_run_side_by_side(server: Server) -> None:
    """Streaming, greedy, sampled and beam requests at once answer what they answer alone."""

    def streamed(prompt: str) -> str:
        events = complete(server, prompt, 24, temperature=0, stream=True)
        return "".join(event.choices[0].text for event in events if event.choices)

    def texts(**options: Any) -> Any:
        return lambda prompt: [c.text for c in complete(server, prompt, 24, **options).choices]

    kinds = [
        streamed,
        texts(temperature=0),
        texts(n=3, **beams(6)),
        texts(n=4, use_beam_search=True),
        texts(n=2, stop=["\n\n"], **beams(4)),
    ]
    jobs = [(kind, prompt) for prompt in PROMPTS for kind in kinds]
    alone = [kind(prompt) for kind, prompt in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = [future.result() for future in [pool.submit(kind, prompt) for kind, prompt in jobs]]
    assert together == alone


def abort_by(server: Server, vanish: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Let a client vanish, again where its search was over before that: it is a race, which a busy machine decides."""
    for _ in range(20):
        server.wait_until_idle()
        aborted = finished_groups(server)["abort"]
        asyncio.run(vanish())
        server.wait_until_idle()
        if finished_groups(server)["abort"] == aborted + 1:
            return
    pytest.fail("no search ended with its client")


@pytest.mark.parametrize("options", [beams(64), {"use_beam_search": True, **beams(64)}])
def test_a_client_that_vanishes_takes_its_search_with_it(server: Server, options: dict[str, Any]) -> None:
    async def vanish() -> None:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        body = {"ignore_eos": True, **options}
        asked = client.completions.create(model="target", prompt=[5] * 16, max_tokens=480, n=8, extra_body=body)
        search, running = asyncio.create_task(asked), 0.0
        while not running and not search.done():
            running = await asyncio.to_thread(server.gauge, "vllm:num_requests_running")
        search.cancel()
        await asyncio.wait([search])
        assert running <= 1, "one search of 64 beams is one running request"

    abort_by(server, vanish)
    assert complete(server, max_tokens=4).choices[0].text


def test_prompt_and_generated_tokens_are_counted_once(server: Server) -> None:
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    before = [server.gauge(name) for name in names]
    usage = complete(server, "def count(", n=3, **beams(5)).usage
    server.wait_until_idle()
    after = [server.gauge(name) for name in names]
    assert [a - b for a, b in zip(after, before, strict=True)] == [usage.prompt_tokens, usage.completion_tokens]


def finished_groups(server: Server) -> dict[str, float]:
    """How many beam groups ended so far, by reason."""
    name = "vllm:trie_beam_groups_finished_total"
    reasons = ("stop", "length", "abort", "error")
    return {reason: server.gauge(name, label=f'finished_reason="{reason}"') for reason in reasons}


def test_metrics_move_by_what_a_request_must_do(server: Server) -> None:
    names = ["steps", "kv_blocks_shared", "kv_blocks_copied", "kv_blocks_reclaimed", "preemptions"]

    def counters() -> dict[str, float]:
        return {name: server.gauge(f"vllm:trie_beam_{name}_total") for name in names}

    server.wait_until_idle()
    before, ended_before = counters(), finished_groups(server)
    complete(server, [5] * 10, 12, n=3, ignore_eos=True, **beams(5))  # within one block
    server.wait_until_idle()
    moved = {name: after - before[name] for name, after in counters().items()}
    assert moved.pop("kv_blocks_copied") >= 4, "fanning out copies the prompt's partly filled block"
    assert moved == {"steps": 12, "kv_blocks_shared": 0, "kv_blocks_reclaimed": 0, "preemptions": 0}
    complete(server, [5] * 60, 40, n=3, ignore_eos=True, **beams(5))
    server.wait_until_idle()
    assert counters()["kv_blocks_shared"] > before["kv_blocks_shared"]
    ended = {reason: after - ended_before[reason] for reason, after in finished_groups(server).items()}
    assert ended == {"stop": 0, "length": 2, "abort": 0, "error": 0}
    assert server.gauge("vllm:trie_beam_kv_blocks_peak") >= 1 + 5
    assert server.gauge("vllm:trie_beam_groups_running") == server.gauge("vllm:trie_beam_rows_running") == 0


def test_metrics_are_those_of_the_documents_and_none_without_the_plugin(server: Server, stock: Server) -> None:
    documented = re.findall(
        r"^\| `(vllm:trie_beam_\w+)` \| (\w+)", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE
    )
    shown = re.findall(r"^# TYPE (vllm:trie_beam_\w+) (\w+)", server.metrics(), re.MULTILINE)
    created = [(name, kind) for name, kind in shown if name.endswith("_created")]  # when, beside each counter
    assert sorted(set(shown) - set(created)) == sorted(documented)
    assert "trie" not in stock.metrics()


def test_data_parallel_engines_get_whole_groups(parallel: Server, server: Server) -> None:
    def of_each_engine(name: str) -> np.ndarray:
        return np.array([parallel.gauge(name, engine=engine) for engine in ("0", "1")])

    counters = ("vllm:prompt_tokens_total", "vllm:trie_beam_groups_finished_total")
    prompts = [f"def f{i}(" for i in range(12)]
    before = [of_each_engine(name) for name in counters]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda prompt: complete(parallel, prompt, n=4, **beams(6)), prompts))
    parallel.wait_until_idle("vllm:trie_beam_groups_running")
    prompt_tokens, groups = (of_each_engine(name) - old for name, old in zip(counters, before, strict=True))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert [c.text for c in answer.choices] == [c.text for c in complete(server, prompt, n=4, **beams(6)).choices]
    assert min(prompt_tokens) > 0, "one engine did everything"
    assert sum(prompt_tokens) == sum(answer.usage.prompt_tokens for answer in answers)
    assert min(groups) > 0
    assert sum(groups) == 12, "several API servers add up to the truth"


def test_speculation_is_asked_for_over_http(parallel: Server) -> None:
    def found(**options: Any) -> tuple[list[str], dict[str, Any] | None]:
        response = complete(parallel, n=4, **options)
        took = response.model_dump().get("kv_transfer_params")
        return [c.text for c in response.choices], took and took["trie_beam"]

    plain, exact = (found(**beams(4, speculation=how)) for how in ("off", "exact"))
    wide, default = found(**beams(4, speculation="exact", draft_width=16)), found(**beams(4))
    assert plain[0] == exact[0] == wide[0] == default[0]
    assert plain[1] is None
    drafted_per_forward = [one[1]["drafted"] / one[1]["target_forwards"] for one in (wide, exact)]
    assert drafted_per_forward[0] > drafted_per_forward[1] > 0
    assert default[1]["target_forwards"] > 0, "by default a search speculates as far as it pays"
    as_vllm, off = (
        found(use_beam_search=True, vllm_xargs={"speculation": speculation}) for speculation in ("exact", "off")
    )
    assert as_vllm[0] == off[0]
    drawn = {"seed": 3, "temperature": 0.7}
    one, again, other = (found(**drawn | {"seed": s}, **beams(4, do_sample=1, threshold=0.8)) for s in (3, 3, 4))
    assert one[0] == again[0] != other[0] != plain[0]
    assert one[1]["mean_width"] < 4
    assert found(**drawn, **beams(4, do_sample=1))[0] != found(seed=3, **beams(4, do_sample=1))[0], "temperature counts"
    for options, message in [
        (beams(4, speculation=1), "speculation=1 is unknown; known: 'auto', 'exact', 'sample', 'off'"),
        (beams(4, do_sample=2), "do_sample=2 is neither true nor false"),
        (beams(4, draft_widht=8), "unknown option draft_widht=8; did you mean draft_width?"),
        (beams(4, memory_mode=1), 'memory_mode=True means nothing where beams are not drawn; set speculation="sample"'),
        (beams(4, threshold="0.7", do_sample=1), "threshold='0.7' is not a probability"),
    ]:
        with pytest.raises(openai.BadRequestError) as refusal:
            found(**options)
        assert message in refusal.value.message
