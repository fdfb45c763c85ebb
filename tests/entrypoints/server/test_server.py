"""What fields of requests become, with beams and without."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from tests.support.served import beams
from vllm_trie.compat.patch import wrap_vllm
from vllm_trie.entrypoints.requests.refusals import BeamRequestError
from vllm_trie.entrypoints.server import streams, use_beam_search
from vllm_trie.entrypoints.server.server import is_server_request, num_server_prompts
from vllm_trie.options import parse_options
from vllm_trie.options.shown import MOST_QUOTED
from vllm_trie.sampling_params import refuse_sampling_params


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        (CompletionRequest, {"prompt": "x"}),
        (ChatCompletionRequest, {"messages": []}),
        (ResponsesRequest, {"input": "x"}),
    ],
)
def test_what_the_request_says_of_sampling_counts_and_served_defaults_do_not(kind: type, asked: dict[str, Any]) -> None:
    wrap_vllm("vllm_trie.entrypoints.server.server")
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
    ("kind", "asked"), [(CompletionRequest, {"prompt": "x"}), (ChatCompletionRequest, {"messages": []})]
)
def test_what_is_rendered_shows_the_options_of_the_client_alone(kind: type, asked: dict[str, Any]) -> None:
    wrap_vllm("vllm_trie.entrypoints.server.server")
    params = kind(**asked, **beams(4, length_penalty=0.5)).to_sampling_params(8, {})
    assert is_server_request(params)
    rendered = json.loads(GenerateRequest(token_ids=[5], sampling_params=params).model_dump_json())
    assert rendered["sampling_params"]["extra_args"] == {"beam_width": 4, "length_penalty": 0.5}
    assert GenerateRequest.model_validate(rendered).sampling_params == params


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_fields_by_names_of_other_systems_are_refused_with_beams_and_left_alone_otherwise(kind: type) -> None:
    wrap_vllm("vllm_trie.entrypoints.server.server")
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


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_refusals_of_vllms_own_beam_search_name_what_works_there(kind: type) -> None:
    wrap_vllm("vllm_trie.entrypoints.server.server")
    asked: dict[str, Any] = {"prompt": "x"} if kind is CompletionRequest else {"messages": []}
    in_xargs = 'is not a field of a request; pass it in "vllm_xargs"'
    for fields, why in (
        ({"num_beams": 4}, "unknown option num_beams=4; with use_beam_search, n is the number of beams"),
        ({"best_of": 2}, "unknown option best_of=2; with use_beam_search, n is the number of beams"),
        ({"early_stopping": True}, f'early_stopping=True {in_xargs} with semantics="hf"'),
        ({"early_stopping": True, "vllm_xargs": {"num_beam_groups": 2}}, f"early_stopping=True {in_xargs}"),
        ({"no_repeat_ngram_size": 2}, f"no_repeat_ngram_size=2 {in_xargs}"),
        (
            {"best_of": 2, **beams(4)},
            "unknown option best_of=2; beam_width is the number of beams, n the number of hypotheses returned",
        ),
    ):
        with pytest.raises(BeamRequestError) as raised:
            kind(**asked, use_beam_search=True, **fields).to_beam_search_params(8, {})
        assert str(raised.value) == why


def test_another_name_of_the_width_among_the_options_of_vllms_own_beam_search_is_refused() -> None:
    wrap_vllm("vllm_trie.entrypoints.server.server")
    request = CompletionRequest(prompt="x", use_beam_search=True, vllm_xargs={"num_beams": 4})
    params = request.to_beam_search_params(8, {})
    with pytest.raises(BeamRequestError, match=r"^unknown option num_beams=4; with use_beam_search, n is the number"):
        use_beam_search._served_beam_search_params(request, params, 20)


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        (CompletionRequest, {"prompt": "x", "echo": True}),
        (CompletionRequest, {"prompt": "x", "echo": True, "max_tokens": 0}),
        (CompletionRequest, {"prompt": "x", "stream": True, "logprobs": 0}),
        (ChatCompletionRequest, {"messages": [], "echo": True}),
        (ChatCompletionRequest, {"messages": [], "echo": True, "logprobs": True, "top_logprobs": 3}),
        (ChatCompletionRequest, {"messages": [], "echo": True, "stream": True}),
        (ResponsesRequest, {"input": "x", "stream": True}),
        (ResponsesRequest, {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    ],
    ids=str,
)
def test_no_field_that_vllm_derives_is_refused(kind: type, asked: dict[str, Any]) -> None:
    wrap_vllm("vllm_trie.entrypoints.server.server")
    params = kind(**asked, **beams(4)).to_sampling_params(8, {})
    beam = parse_options(params.extra_args)
    assert beam is not None
    refuse_sampling_params(params, beam)
    assert params.prompt_logprobs is None
    assert not params.skip_reading_prefix_cache


def test_prompt_logprobs_that_a_client_sends_are_kept_to_be_refused() -> None:
    wrap_vllm("vllm_trie.entrypoints.server.server")
    for echo in (False, True):
        chat = ChatCompletionRequest(messages=[], echo=echo, prompt_logprobs=1, **beams(4))
        assert chat.to_sampling_params(8, {}).prompt_logprobs == 1


@pytest.mark.parametrize("name", ["compact", "trace", "beam_results"])
def test_a_transcription_has_no_place_for_arrays(name: str) -> None:
    wrap_vllm("vllm_trie.entrypoints.server.server")
    asked = TranscriptionRequest.model_construct(vllm_xargs={"beam_width": 2, name: 1}, length_penalty=1.0)
    with pytest.raises(BeamRequestError, match=f"{name}=1 is not supported at this endpoint"):
        asked.to_sampling_params(8, {})


@pytest.mark.parametrize(("asked", "vllms_own", "most", "expected"), [
    (5, 8, 20, 5), (20, 8, 20, 20), (21, 8, 20, 20), (21, 8, -1, 21), (-1, 8, 20, 8), (-1, 8, -1, 8), (-1, 30, 20, 20),
])  # fmt: skip
def test_logprobs_beyond_the_limit_are_as_many_as_there_may_be(
    asked: int, vllms_own: int, most: int, expected: int
) -> None:
    assert use_beam_search._num_served_logprobs(asked, vllms_own, most) == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, (3, None)),
        ({"X-Vllm-Priority": "-7"}, (-7, None)),
        ({"X-Vllm-Priority": "?"}, (3, None)),
        ({"X-data-parallel-rank": "1"}, (3, 1)),
        ({"X-data-parallel-rank": "?"}, (3, None)),
    ],
    ids=str,
)
def test_headers_name_a_priority_that_goes_before_the_bodys_and_a_rank(
    monkeypatch: pytest.MonkeyPatch, stream: bool, headers: dict[str, str], expected: tuple[int, int | None]
) -> None:
    """Up to what the search asks the engine for, as vLLM hands it on: its own beams in 0.32 know neither."""
    asked_of_engine = list[Any]()
    wrap_vllm("vllm_trie.entrypoints.server.server")
    wrap_vllm("vllm_trie.entrypoints.server.use_beam_search")
    monkeypatch.setattr(streams, "has_beams", lambda _: True)
    monkeypatch.setattr(use_beam_search, "has_beams", lambda _: True)

    def generate(prompt: Any, params: SamplingParams, request_id: str, **kwargs: Any) -> Any:
        asked_of_engine.append((kwargs["priority"], kwargs["data_parallel_rank"]))
        return nothing()

    async def nothing() -> Any:
        for event in ():
            yield event

    async def as_vllm(self: Any, request: CompletionRequest, raw_request: Any) -> Any:
        params = request.to_sampling_params(8, {}) if stream else request.to_beam_search_params(8, {})
        async for _ in self.beam_search(prompt={"type": "token"}, request_id="1", params=params):
            pass
        return None

    serving = OpenAIServingCompletion.__new__(OpenAIServingCompletion)
    config = SimpleNamespace(speculative_config=None)
    serving.engine_client = SimpleNamespace(vllm_config=config, generate=generate)
    serving.model_config = SimpleNamespace(max_logprobs=20)
    request = CompletionRequest(prompt="x", use_beam_search=True, priority=3, stream=stream)
    raw_request = SimpleNamespace(headers=headers, app=SimpleNamespace(state=SimpleNamespace()))
    asyncio.run(streams.create_server_response.function(as_vllm, serving, request, raw_request))
    assert asked_of_engine == [expected]


def test_what_vllm_refuses_of_a_beam_request_is_quoted_in_short() -> None:
    wrap_vllm("vllm_trie.entrypoints.server.server")
    lengths = []
    for options in (beams(2), {}):
        request = CompletionRequest(prompt="x", logit_bias={"y" * 1_000: 1}, **options)
        with pytest.raises(VLLMValidationError, match="logit_bias") as raised:
            request.to_sampling_params(8, {})
        lengths.append(len(str(raised.value)))
    assert lengths[0] <= MOST_QUOTED < lengths[1]


def test_a_number_of_any_length_is_quoted_in_short() -> None:
    wrap_vllm("vllm_trie.entrypoints.server.server")
    for digits in (4_000, 10_000):
        with pytest.raises(BeamRequestError, match=r"^logprobs=.{1,80} with echo=True") as refusal:
            CompletionRequest(prompt="x", echo=True, **beams(4)).model_copy(
                update={"logprobs": 10**digits}
            ).to_sampling_params(8, {})
        assert len(str(refusal.value)) < 200


def test_options_are_refused_where_vllms_own_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would ignore them."""
    wrap_vllm("vllm_trie.entrypoints.server.server")
    monkeypatch.setattr(use_beam_search, "has_beams", lambda _: True)
    serving = SimpleNamespace(engine_client=SimpleNamespace(vllm_config=None))
    asked = CompletionRequest(prompt="x", use_beam_search=True, vllm_xargs={"other": 1, "beam_width": 3})

    async def first(request: CompletionRequest) -> None:
        params = request.to_beam_search_params(8, {})
        await anext(use_beam_search.serve_beam_search.function(vllms_own, serving, {"type": "embeds"}, "1", params))

    async def vllms_own(self: Any, prompt: Any, request_id: str, params: Any) -> Any:
        yield None

    with pytest.raises(BeamRequestError, match="; beam_width=3 has no effect in vLLM's own loop: leave it or"):
        asyncio.run(first(asked))
    asyncio.run(first(asked.model_copy(update={"vllm_xargs": {"other": 1}})))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": "x"}, 1),
        ({"prompt": [5, 6]}, 1),
        ({"prompt": ["x", "y"]}, 2),
        ({"prompt": [[5], [6], [7]]}, 3),
        ({"prompt_embeds": b"A"}, 1),
        ({"prompt_embeds": [b"A", b"B"]}, 2),
        ({"prompt": "", "prompt_embeds": [b"A"]}, 2),
    ],
    ids=str,
)
def test_prompts_of_all_kinds_are_counted(fields: dict[str, Any], expected: int) -> None:
    assert num_server_prompts(CompletionRequest(**{"prompt": None, **fields})) == expected


@pytest.mark.parametrize(
    ("kind", "asked"), [(CompletionRequest, {"prompt": "x"}), (ChatCompletionRequest, {"messages": []})]
)
def test_special_tokens_are_shown_as_the_server_is_set(kind: type, asked: dict[str, Any]) -> None:
    """Where vLLM has such a default: 0.33."""
    wrap_vllm("vllm_trie.entrypoints.server.server")
    served = {"skip_special_tokens": False}
    expected = kind(**asked).to_sampling_params(8, served).skip_special_tokens
    assert kind(**asked, **beams(4)).to_sampling_params(8, served).skip_special_tokens == expected
    as_vllm = kind(**asked, use_beam_search=True)
    params = as_vllm.to_beam_search_params(8, served)
    own = use_beam_search._served_beam_search_params(as_vllm, params, -1)
    assert own.skip_special_tokens == params.skip_special_tokens == expected


@pytest.mark.parametrize("options", [{}, {"length_penalty": 0.5}, {"beam_width": 3}], ids=str)
def test_no_tokens_ask_the_engine_for_nothing(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    wrap_vllm("vllm_trie.entrypoints.server.server")
    monkeypatch.setattr(use_beam_search, "has_beams", lambda _: True)
    empty = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[])])

    async def vllms_own(self: Any, prompt: Any, request_id: str, params: Any) -> Any:
        yield empty

    async def found() -> list[Any]:
        search = use_beam_search.serve_beam_search.function
        return [output async for output in search(vllms_own, serving, {"type": "token"}, "1", params)]

    engine = SimpleNamespace(vllm_config=None, input_processor=SimpleNamespace(generation_config_fields={}))
    renderer = SimpleNamespace(get_tokenizer=lambda: SimpleNamespace(eos_token_id=None))
    serving = SimpleNamespace(engine_client=engine, renderer=renderer)
    request = CompletionRequest(prompt="x", use_beam_search=True, max_tokens=0, vllm_xargs=options)
    params = request.to_beam_search_params(0, {})
    assert asyncio.run(found()) == [empty]
