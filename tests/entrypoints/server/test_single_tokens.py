"""Streams of one token a part: their texts, and what parsers make of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser.abstract_parser import DelegatingParser
from vllm.reasoning import ReasoningParserManager
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from tests.support.engine import TRAINED_TARGET
from vllm_trie.compat.patch import wrap_vllm
from vllm_trie.entrypoints.server.single_tokens import (
    asking_single_token_stream,
    asks_single_token_stream,
    single_token_stream,
)
from vllm_trie.messages import TICKET

TEXT = "<think>Is 'é€😀' a name?\n\n</think>\nnaïve = 1\n"
MARKS = ["<think>", "</think>", "<response>", "</response>"]
PARSERS = ["deepseek_r1", "qwen3", "glm45", "ernie45", "hunyuan_a13b"]


def tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(TRAINED_TARGET)
    made.add_tokens(MARKS)
    return made


TOKENIZER = tokenizer()
PROMPT = TOKENIZER.encode("x = 'é", add_special_tokens=False)[:-1]  # ends within a character
TOKENS = TOKENIZER.encode(TEXT, add_special_tokens=False)


def params_of(**options: Any) -> SamplingParams:
    wrap_vllm("vllm_trie.entrypoints.answers.answer_start")
    return SamplingParams(skip_special_tokens=False, extra_args={TICKET: {}}, **options)


def parts_of(tokens: Sequence[int], cuts: Sequence[int], params: SamplingParams, end: str) -> list[RequestOutput]:
    """A stream of which each part has the tokens from one cut to the next, as vLLM's front end makes its text."""
    request: Any = type("Request", (), {"request_id": "", "prompt_token_ids": PROMPT, "sampling_params": params})
    detokenizer = IncrementalDetokenizer.from_new_request(TOKENIZER, request)
    bounds, parts = [0, *sorted({cut % len(tokens) for cut in cuts} - {0}), len(tokens)], []
    for start, stop in pairwise(bounds):
        is_last, own = stop == len(tokens), [*tokens[start:stop]]
        stop_string = detokenizer.update(own, False)
        assert stop_string is None or is_last
        text = detokenizer.get_next_output_text(is_last, True)
        places: Any = [{token: Logprob(-float(token))} for token in own]
        reason = ("stop" if stop_string else end) if is_last else None
        part = CompletionOutput(0, text, own, -1.0, places, finish_reason=reason, stop_reason=stop_string)
        parts.append(RequestOutput("0", None, PROMPT, None, [part], finished=is_last))
    return parts


def singly(parts: list[RequestOutput], params: SamplingParams) -> list[RequestOutput]:
    async def stream() -> AsyncGenerator[RequestOutput, None]:
        for part in parts:
            yield part

    async def read() -> list[RequestOutput]:
        return [part async for part in single_token_stream(stream(), params, TOKENIZER)]

    return asyncio.run(read())


@settings(max_examples=60, derandomize=True)
@given(st.lists(st.integers(1, 60), max_size=5), st.sampled_from([None, "naïve", "= 1\n", " a name"]), st.booleans())
def test_each_token_comes_with_the_text_that_it_would_have_alone(
    cuts: list[int], stop: str | None, includes_stop: bool
) -> None:
    params = params_of(stop=stop, include_stop_str_in_output=includes_stop)
    end = len(TOKENS)
    if stop is not None:  # where a search ends, too
        end = next(n for n in range(1, end + 1) if stop in TOKENIZER.decode(TOKENS[:n]))
    alone = parts_of(TOKENS[:end], range(end), params, "length")
    together = singly(parts_of(TOKENS[:end], cuts, params, "length"), params)
    assert [part.outputs[0].text for part in together] == [part.outputs[0].text for part in alone]
    assert [part.outputs[0].token_ids for part in together] == [part.outputs[0].token_ids for part in alone]
    assert [part.outputs[0].logprobs for part in together] == [part.outputs[0].logprobs for part in alone]
    ends = [(part.finished, part.outputs[0].finish_reason, part.outputs[0].stop_reason) for part in together]
    assert ends == [(False, None, None)] * (end - 1) + [(True, "stop" if stop else "length", stop)]


def parsed(parts: list[RequestOutput], parser_name: str) -> tuple[str, str]:
    class Parser(DelegatingParser):
        reasoning_parser_cls = ReasoningParserManager.get_reasoning_parser(parser_name)

    parser, request = Parser(TOKENIZER), ChatCompletionRequest(messages=[])
    reasoning = content = ""
    for part in parts:
        output = part.outputs[0]
        delta = parser.parse_delta(output.text, [*output.token_ids], request, PROMPT, finished=part.finished)
        reasoning += (delta and delta.reasoning) or ""
        content += (delta and delta.content) or ""
    return reasoning, content


@pytest.mark.parametrize("parser_name", PARSERS)
@pytest.mark.parametrize("cuts", [[], [1], [3, 9], [2, 4, 6, 8, 10, 12]], ids=str)
def test_parsers_read_the_parts_of_a_search_as_single_tokens(parser_name: str, cuts: list[int]) -> None:
    params = params_of()
    alone = parsed(parts_of(TOKENS, range(len(TOKENS)), params, "length"), parser_name)
    assert parsed(singly(parts_of(TOKENS, cuts, params, "length"), params), parser_name) == alone


@pytest.mark.parametrize("forged", [True, 1, "true", ["beam_width", "beam_width"]])
def test_no_client_can_ask_for_single_tokens(forged: Any) -> None:
    request = asking_single_token_stream(ChatCompletionRequest(messages=[]))
    (name,) = request.vllm_xargs
    assert asks_single_token_stream(request.to_sampling_params(8, {}))
    assert not asks_single_token_stream(SamplingParams(extra_args={name: forged}))
