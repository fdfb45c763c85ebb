"""A grammar never begins inside reasoning, whatever switches that on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.parser.abstract_parser import DelegatingParser
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from tests.support.engine import TRAINED_TARGET
from tests.support.served import beams
from vllm_trie.compat.patch import wrap_vllm
from vllm_trie.entrypoints import async_llm
from vllm_trie.entrypoints.requests.grammars import prepare_request_grammar
from vllm_trie.entrypoints.server import use_beam_search

THINKING, DIRECT = ({"thinking": is_on} for is_on in (True, False))
CASES = [  # what a server knows of the reasoning, and whether a search refuses a grammar then
    ({}, False),  # this parser's default
    ({"reasoning_parser_kwargs": {"chat_template_kwargs": DIRECT}}, False),
    ({"reasoning_parser_kwargs": {"chat_template_kwargs": THINKING}}, True),
    ({"reasoning_parser_kwargs": {"chat_template_kwargs": THINKING}, "reasoning_ended": True}, False),
    ({"reasoning_parser_kwargs": {"chat_template_kwargs": THINKING}, "reasoning_ended": False}, True),
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(TRAINED_TARGET)
    made.add_tokens(["<think>", "</think>"])
    return made


@pytest.mark.parametrize(("reasoning", "is_refused"), CASES, ids=str)
def test_what_a_server_knows_of_the_reasoning_decides(
    tokenizer: Any, reasoning: dict[str, Any], is_refused: bool
) -> None:
    config: Any = SimpleNamespace(reasoning_parser="deepseek_v3", enable_in_reasoning=False)
    engine: Any = SimpleNamespace(vllm_config=None, renderer=SimpleNamespace(tokenizer=tokenizer))
    seen = list[SamplingParams]()

    def generate(self: Any, prompt: Any, params: SamplingParams, request_id: str, **kwargs: Any) -> Any:
        assert kwargs == reasoning
        seen.append(params)

    grammar = StructuredOutputsParams(regex="x")
    grammar._backend = "xgrammar"
    asked = SamplingParams(structured_outputs=grammar, extra_args={"beam_width": 2})
    async_llm.async_llm_generate.function(generate, engine, "x", asked, "1", **reasoning)
    assert asked.extra_args == {"beam_width": 2}
    (params,) = seen
    prompt = tokenizer.encode("x = <think>", add_special_tokens=False)
    if not is_refused:
        prepare_request_grammar(params, prompt, config, tokenizer)
        return
    with pytest.raises(ValueError, match=r"structured_outputs cannot begin after reasoning .* switch it off"):
        prepare_request_grammar(params, prompt, config, tokenizer)


@pytest.mark.parametrize(
    ("fields", "has_ended"),
    [
        ({"chat_template_kwargs": THINKING}, False),
        ({"chat_template_kwargs": DIRECT}, True),
        ({"chat_template_kwargs": THINKING, "include_reasoning": False}, True),
    ],
    ids=str,
)
def test_use_beam_search_tells_the_engine_of_the_reasoning(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any, fields: dict[str, Any], has_ended: bool
) -> None:
    class Parser(DelegatingParser):
        reasoning_parser_cls = ReasoningParserManager.get_reasoning_parser("deepseek_v3")

    wrap_vllm("vllm_trie.entrypoints.server.server")
    monkeypatch.setattr(use_beam_search, "has_beams", lambda _: True)
    sent = list[dict[str, Any]]()

    async def generate(prompt: Any, params: SamplingParams, request_id: str, **kwargs: Any) -> Any:
        sent.append(kwargs)
        for event in ():
            yield event

    serving = OpenAIServingChat.__new__(OpenAIServingChat)
    serving.engine_client = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=None), generate=generate)
    serving.model_config = SimpleNamespace(max_logprobs=20)
    serving.renderer = SimpleNamespace(get_tokenizer=lambda: tokenizer)
    serving.parser_cls = Parser
    serving._effective_chat_template_kwargs = lambda request: request.chat_template_kwargs
    tokens = tokenizer.encode("x = <think>", add_special_tokens=False)
    serving._extract_prompt_components = lambda prompt: SimpleNamespace(token_ids=tokens)

    async def search(**asked: Any) -> None:
        request = ChatCompletionRequest(messages=[], use_beam_search=True, **asked, **beams(2))
        params = request.to_beam_search_params(8, {})
        of_request = {"lora_request": None, "trace_headers": None, "session_id": None}
        prompt = {"type": "token"}
        async for _ in serving.beam_search(prompt=prompt, request_id="1", params=params, **of_request):
            pass

    wrap_vllm("vllm_trie.entrypoints.server.use_beam_search")
    asyncio.run(search(**fields, response_format={"type": "json_object"}))
    (sent_kwargs,) = sent
    assert sent_kwargs["reasoning_ended"] is has_ended
    assert sent_kwargs["reasoning_parser_kwargs"] == {"chat_template_kwargs": fields["chat_template_kwargs"]}
