"""`stream=true` with beams.

A search with one answer is streamed like any other: the engine sends what all beams have in common as soon as it is
certain (`engine/answer_prefix.py`). Several answers, `compact`, `beam_results`, traces, searches by steps, and tool
calls, which are parsed from a whole text, are known only at the end: then each choice is one chunk.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, TypeAlias

from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse, CompletionStreamResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo, ErrorResponse, UsageInfo
from vllm.entrypoints.serve.utils.api_utils import should_include_usage
from vllm.outputs import CompletionOutput, RequestOutput

from vllm_trie.compat.patch import wraps_vllm
from vllm_trie.entrypoints.answers.beam_results import BEAM_RESULTS
from vllm_trie.entrypoints.answers.noted_outputs import noting_answer_outputs
from vllm_trie.entrypoints.requests.refusals import BeamRequestError
from vllm_trie.entrypoints.server.keep_alive import server_keep_alive_interval, stream_within_interval
from vllm_trie.entrypoints.server.server import as_served_sampling_request, end_response_without_calls
from vllm_trie.entrypoints.server.single_tokens import asking_single_token_stream
from vllm_trie.entrypoints.server.use_beam_search import DATA_PARALLEL_RANK
from vllm_trie.options import PLUGIN_NAME, options_ask_for_beams
from vllm_trie.supported_engines import has_beams

Request: TypeAlias = CompletionRequest | ChatCompletionRequest
Response: TypeAlias = CompletionResponse | ChatCompletionResponse

WITH_OWN_FIELDS = ("trace", BEAM_RESULTS)  # options
OWN_FIELDS = ("trace", "meta_info")  # of responses

DATA = "data: "
DONE = f"{DATA}[DONE]"


@wraps_vllm("create_completion", "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion")
@wraps_vllm("create_chat_completion", "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat")
async def create_server_response(
    original: Callable[..., Awaitable[Any]], self: Any, request: Request, raw_request: Any = None
) -> Any:
    is_search = request.use_beam_search or options_ask_for_beams(request.vllm_xargs or {})
    if request.use_beam_search:  # 0.32 reads the header's priority only for other requests
        request = request.model_copy(update={"priority": self._get_priority(request, raw_request)})
        DATA_PARALLEL_RANK.set(self._get_data_parallel_rank(raw_request))
    is_of_messages = isinstance(self, AnthropicServingMessages)
    has_own_fields = is_search and _asks_own_response_fields(request) and not is_of_messages
    if not (request.stream and is_search and has_beams(self.engine_client.vllm_config)):
        response = await original(self, request, raw_request)
        return _completed_server_response(response, is_search, has_own_fields)
    beginning = _begin_server_stream(original, self, request, raw_request, has_own_fields)
    if is_of_messages or not (interval := server_keep_alive_interval(raw_request)):
        return await beginning
    return await stream_within_interval(beginning, interval, self.create_streaming_error_response)


async def _begin_server_stream(
    original: Callable[..., Awaitable[Any]], self: Any, request: Request, raw_request: Any, has_own_fields: bool
) -> AsyncGenerator[str, None] | ErrorResponse:
    """A stream of beams once it has something to send, or the error that it begins with."""
    if _is_streamed_early(request):
        streamed = as_served_sampling_request(request)
        if isinstance(request, ChatCompletionRequest) and self.parser_cls is not None:
            streamed = asking_single_token_stream(streamed)
        with noting_answer_outputs() as noted:  # `use_beam_search` calls the engine when its first event is awaited
            events = await original(self, streamed, raw_request)
            return (
                await _stream_after_refusals(events, request, noted) if isinstance(events, AsyncGenerator) else events
            )
    if isinstance(self, AnthropicServingMessages):
        raise BeamRequestError(
            'messages with compact, beam_results, trace, unit="step" or tools cannot be streamed; leave stream out'
        )
    whole = request.model_copy(update={"stream": False, "stream_options": None})
    with noting_answer_outputs() as outputs:
        response = _completed_server_response(await original(self, whole, raw_request), True, has_own_fields)
    if not isinstance(response, Response):  # an error
        return response
    has_usage, in_chunks = should_include_usage(request.stream_options, self.enable_force_include_usage)
    usages = (
        _stream_usages(self, whole, response, [output for noted in outputs for output in noted]) if in_chunks else None
    )
    return _stream_events(response, has_usage, usages)


@wraps_vllm("create_responses", "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses")
async def respond_with_stream(
    original: Callable[..., Awaitable[Any]], self: Any, request: ResponsesRequest, *args: Any, **kwargs: Any
) -> Any:
    """Hold back the two events that vLLM sends before it calls the engine, so that a refusal becomes a 400."""
    if not options_ask_for_beams(request.vllm_xargs or {}):
        return await original(self, request, *args, **kwargs)
    if request.stream and self.parser is not None:
        request = asking_single_token_stream(request)
    events = await original(self, request, *args, **kwargs)
    if not isinstance(events, AsyncGenerator) or request.background:
        return events
    return chained_stream([await anext(events) for _ in ("created", "in progress", "of the answer")], events)


async def chained_stream(first: list[Any], others: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """The events of a stream, after the first ones that were already taken from it."""
    async with aclosing(others):
        for event in first:
            yield event
        async for event in others:
            yield event


def _asks_own_response_fields(request: Request) -> bool:
    return any((request.vllm_xargs or {}).get(name) for name in WITH_OWN_FIELDS)


def _completed_server_response(response: Any, is_search: bool, has_own_fields: bool) -> Any:
    """A response, or an error, in the form for clients of a search."""
    if is_search and isinstance(response, ChatCompletionResponse):
        end_response_without_calls(response)
    return _server_response_with_fields(response) if has_own_fields else response


def _server_response_with_fields(response: Any) -> Any:
    """Move a trace and `beam_results` from the engine's output to separate fields of the response."""
    if isinstance(response, Response) and PLUGIN_NAME in (params := response.kv_transfer_params or {}):
        others = {**params.pop(PLUGIN_NAME)}
        if "trace" in others:
            response.trace = others.pop("trace")
        if BEAM_RESULTS in others:
            response.meta_info = {BEAM_RESULTS: others.pop(BEAM_RESULTS)}
        if others:
            params[PLUGIN_NAME] = others
        response.kv_transfer_params = params or None
    return response


def _is_streamed_early(request: Request) -> bool:
    """Whether the answer is sent while the search goes on."""
    calls_tools = isinstance(request, ChatCompletionRequest) and request.tools and request.tool_choice != "none"
    xargs = request.vllm_xargs or {}
    comes_whole = (
        xargs.get("compact") or _asks_own_response_fields(request) or xargs.get("unit") == "step" or calls_tools
    )
    return (request.n or 1) == 1 and not comes_whole


async def _stream_after_refusals(
    events: AsyncGenerator[str, None], request: Request, noted: list[list[RequestOutput]]
) -> AsyncGenerator[str, None] | ErrorResponse:
    """The events of a stream, or its first event if that is an error, so that a refusal becomes a 400.

    Awaits the first event, before which there is nothing to send.
    """
    first = await first_stream_event(events)
    return first if isinstance(first, ErrorResponse) else _stream_with_every_end(first, events, request, noted)


async def first_stream_event(events: AsyncGenerator[str, None]) -> str | ErrorResponse:
    """The first event of a stream; if it is an error, the stream is closed."""
    first = await anext(events)
    event = _parsed_stream_event(first)
    if "error" not in event:
        return first
    await events.aclose()
    return ErrorResponse.model_validate(event)


async def begun_stream(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None] | ErrorResponse:
    """A stream whose first event is there, or the error that this is."""
    first = await first_stream_event(events)
    return first if isinstance(first, ErrorResponse) else chained_stream([first], events)


async def _stream_with_every_end(
    first: str, events: AsyncGenerator[str, None], request: Request, noted: list[list[RequestOutput]]
) -> AsyncGenerator[str, None]:
    """The events of a stream, and an end for each search that sent and found nothing, for which vLLM sends none.

    Args:
        noted: By prompt, the engine's last output so far.
    """
    without_end = {*range(len(noted))}
    async with aclosing(events):  # a client that disconnects ends its search
        event = first
        while True:
            if '"finish_reason":"' in event:
                without_end -= {choice["index"] for choice in _parsed_stream_event(event)["choices"]}
            elif event.startswith(f'{DATA}{{"error"'):
                without_end = set()
            elif '"choices":[]' in event or event.startswith(DONE):
                for index in sorted(without_end):
                    yield _stream_end_of_nothing(
                        index, noted[index][-1].outputs[0], _parsed_stream_event(first), request
                    )
                without_end = set()
            yield event
            try:
                event = await anext(events)
            except StopAsyncIteration:
                return


def _stream_end_of_nothing(index: int, last: CompletionOutput, first: dict[str, Any], request: Request) -> str:
    """The only chunk of a choice without a hypothesis."""
    end = {"index": index, "logprobs": None, "finish_reason": last.finish_reason, "stop_reason": last.stop_reason}
    if isinstance(request, ChatCompletionRequest):
        chunk = {**first, "choices": [{**end, "delta": {}}]}
    else:
        common = CompletionStreamResponse(model=request.model or "", choices=[]).model_dump(exclude_none=True)
        chunk = {**common, **first, "choices": [{**end, "text": ""}]}
    chunk.pop("usage", None)
    return f"{DATA}{json.dumps(chunk, ensure_ascii=False)}\n\n"


def _parsed_stream_event(event: str) -> dict[str, Any]:
    content = event.removeprefix(DATA)
    return json.loads(content) if content.startswith("{") else {}


def _stream_usages(
    self: Any, request: Request, response: Response, outputs: list[RequestOutput]
) -> list[dict[str, Any]]:
    """The usage of each choice, as vLLM streams it: its prompt's tokens and its own."""
    usages = []
    for output in outputs:
        num_prompt_tokens = len(output.prompt_token_ids or ()) + len(output.encoder_prompt_token_ids or ())
        for found in output.outputs:
            count = len(found.token_ids)
            usage = UsageInfo(prompt_tokens=num_prompt_tokens, completion_tokens=count)
            usage.total_tokens = num_prompt_tokens + count
            if response.usage.completion_tokens_details is not None:
                num_reasoning = _num_streamed_reasoning_tokens(self, request, found)
                usage.completion_tokens_details = CompletionTokenUsageInfo(reasoning_tokens=num_reasoning)
            usages.append(usage.model_dump(mode="json", exclude_none=True))
    if len(usages) == len(response.choices):
        return usages
    return [response.usage.model_dump(mode="json", exclude_none=True)] * len(response.choices)  # of vLLM's client loop


def _num_streamed_reasoning_tokens(self: Any, request: Request, found: CompletionOutput) -> int:
    """Count reasoning tokens as vLLM does in a whole chat; some parsers can count only after parsing."""
    assert isinstance(request, ChatCompletionRequest)
    if self.parser_cls is None:
        return 0
    tokenizer = self.renderer.get_tokenizer()
    parser = self._make_parser(request, tokenizer, self._effective_chat_template_kwargs(request))
    parser.parse(found.text, request, self.enable_auto_tools, found.token_ids)
    return int(parser.count_reasoning_tokens(found.token_ids))


async def _stream_events(
    response: Response, has_usage: bool, usages: list[dict[str, Any]] | None
) -> AsyncGenerator[str, None]:
    """The response as server-sent events: a chunk per choice, and perhaps one with only the usage.

    Args:
        usages: The usage of each choice, if chunks have it.
    """
    for chunk in _stream_chunks(response, has_usage, usages):
        yield f"{DATA}{json.dumps(chunk, ensure_ascii=False)}\n\n"
    yield f"{DONE}\n\n"


def _stream_chunks(
    response: Response, has_usage: bool, usages: list[dict[str, Any]] | None
) -> Iterator[dict[str, Any]]:
    """The chunks of a response; only the last choice's chunk has the plugin's fields, which are large."""
    own = {name: value for name, value in (response.model_extra or {}).items() if name in OWN_FIELDS}
    if PLUGIN_NAME in (response.kv_transfer_params or {}):
        own["kv_transfer_params"] = response.kv_transfer_params
    common = response.model_dump(mode="json", exclude={"choices", "usage", *own}, exclude_none=True)
    usage = response.usage.model_dump(mode="json", exclude_none=True)
    if isinstance(response, ChatCompletionResponse):
        common["object"] = "chat.completion.chunk"
    for number, choice in enumerate(response.choices, start=1):
        chunk = choice.model_dump(mode="json")
        if (message := chunk.pop("message", None)) is not None:
            chunk["delta"] = {name: value for name, value in message.items() if value is not None}
            for index, call in enumerate(chunk["delta"].get("tool_calls", ())):
                call["index"] = index
        of_last = own if number == len(response.choices) else {}
        yield {**common, "choices": [chunk], **({"usage": usages[number - 1]} if usages else {}), **of_last}
    if has_usage:
        yield {**common, "choices": [], "usage": usage}
