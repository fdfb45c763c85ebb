"""Streams with one token per part, for parsers of reasoning and of tool calls.

A search sends as many tokens at once as have become certain. vLLM's parsers look for marks among the tokens of a part:
some take a mark that other tokens follow for text, and some ignore all but one token.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from vllm_trie.entrypoints.requests.requests import SINGLE_TOKENS
from vllm_trie.messages import BEAM_WIDTH, TICKET, Caller

ParsedRequest = TypeVar("ParsedRequest", ChatCompletionRequest, ResponsesRequest)


def asking_single_token_stream(request: ParsedRequest) -> ParsedRequest:
    """A copy of a request that asks for a stream with one token per part."""
    return request.model_copy(update={"vllm_xargs": {**(request.vllm_xargs or {}), SINGLE_TOKENS: BEAM_WIDTH}})


def asks_single_token_stream(params: Any) -> bool:
    """Whether these parameters ask for a stream with one token per part."""
    return isinstance(params, SamplingParams) and isinstance((params.extra_args or {}).get(SINGLE_TOKENS), Caller)


async def single_token_stream(
    outputs: AsyncGenerator[RequestOutput, None], params: SamplingParams, tokenizer: TokenizerLike | None
) -> AsyncGenerator[RequestOutput, None]:
    """Split the outputs of a request with one answer into parts of one token."""
    detokenizer = None
    async with aclosing(outputs):
        async for output in outputs:
            detokenizer = detokenizer or _stream_detokenizer(output.prompt_token_ids, params, tokenizer)
            for part in single_token_stream_parts(output, detokenizer):
                yield part


def _stream_detokenizer(
    prompt: list[int] | None, params: SamplingParams, tokenizer: TokenizerLike | None
) -> IncrementalDetokenizer:
    """A detokenizer like that of the engine's client, which receives several tokens at once."""
    params = copy(params)
    params.extra_args = {TICKET: {}}  # see `entrypoints.answers.answer_start`
    nothing = {"mm_features": None, "pooling_params": None, "lora_request": None, "cache_salt": None}
    request = EngineCoreRequest(
        request_id="",
        prompt_token_ids=prompt,
        sampling_params=params,
        arrival_time=0.0,
        data_parallel_rank=None,
        **nothing,
    )
    return IncrementalDetokenizer.from_new_request(tokenizer, request)


def single_token_stream_parts(output: RequestOutput, detokenizer: IncrementalDetokenizer) -> Iterator[RequestOutput]:
    """Split a part of a stream, as if its tokens had come one by one.

    Args:
        detokenizer: Of this stream; it has received all tokens before this part.
    """
    (whole,) = output.outputs
    text, tokens, logprobs = whole.text, [*whole.token_ids], whole.logprobs
    for place, token in enumerate(tokens[:-1]):
        of_token = _stream_token_text(token, detokenizer)[: len(text)]
        text = text.removeprefix(of_token)
        own = {"token_ids": [token], "logprobs": logprobs and logprobs[place : place + 1], "cumulative_logprob": None}
        part = replace(whole, text=of_token, finish_reason=None, stop_reason=None, **own)
        yield _stream_part_output(output, part, finished=False)
    if tokens and whole.finish_reason is None:
        _stream_token_text(tokens[-1], detokenizer)
    last = replace(whole, text=text, token_ids=tokens[-1:], logprobs=logprobs and logprobs[max(len(tokens) - 1, 0) :])
    yield _stream_part_output(output, last, output.finished)


def _stream_token_text(token: int, detokenizer: IncrementalDetokenizer) -> str:
    detokenizer.update([token], False)
    return detokenizer.get_next_output_text(finished=False, delta=True)


def _stream_part_output(whole: RequestOutput, part: CompletionOutput, finished: bool) -> RequestOutput:
    output = copy(whole)
    output.outputs, output.finished = [part], finished
    return output
