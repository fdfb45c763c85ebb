"""Wraps `AsyncLLM`, the engine client of servers: hooks handle some requests, and outputs of others are completed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from itertools import chain
from typing import Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_trie.compat.patch import arguments_to_vllm, wraps_vllm
from vllm_trie.entrypoints.answers.noted_outputs import noted_answer_outputs
from vllm_trie.entrypoints.answers.search_state import AnswerState, whole_answer
from vllm_trie.entrypoints.output_hooks import ONLINE
from vllm_trie.entrypoints.requests.reading import (
    abort_request_readings,
    generate_once_request_read,
    request_brings_data,
)
from vllm_trie.entrypoints.requests.request_data import RequestReasoning
from vllm_trie.entrypoints.server.server import is_server_request, raise_errors_of_server
from vllm_trie.entrypoints.server.single_tokens import asks_single_token_stream, single_token_stream
from vllm_trie.options import options_ask_for_beams

Generate = Callable[..., AsyncGenerator[RequestOutput, None]]


@wraps_vllm("generate", AsyncLLM)
def async_llm_generate(
    original: Generate, self: AsyncLLM, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
) -> AsyncGenerator[RequestOutput, None]:
    tokenizer, is_parsed = self.renderer.tokenizer, asks_single_token_stream(sampling_params)
    if (hook := ONLINE.of_request(self, sampling_params)) is not None:
        outputs = noted_answer_outputs(
            hook.generate(original, self, prompt, sampling_params, request_id, *args, **kwargs)
        )
        return single_token_stream(outputs, sampling_params, tokenizer) if is_parsed else outputs
    is_search = options_ask_for_beams(
        (isinstance(sampling_params, SamplingParams) and sampling_params.extra_args) or {}
    )
    generate = partial(generate_once_request_read, original) if request_brings_data(sampling_params) else original
    reasoning = RequestReasoning(kwargs.get("reasoning_ended"), kwargs.get("reasoning_parser_kwargs"))
    params = reasoning.noted(sampling_params) if is_search and any(reasoning) else sampling_params
    outputs = generate(self, prompt, params, request_id, *args, **kwargs)
    outputs = noted_answer_outputs(_async_llm_whole_outputs(outputs, tokenizer)) if is_search else outputs
    outputs = single_token_stream(outputs, sampling_params, tokenizer) if is_parsed else outputs
    return raise_errors_of_server(outputs) if is_server_request(sampling_params) else outputs


@wraps_vllm("abort", AsyncLLM)
async def async_llm_abort(
    original: Callable[..., Awaitable[None]], self: AsyncLLM, request_id: str | Iterable[str], *args: Any, **kwargs: Any
) -> None:
    """Also abort requests that are not in the engine, such as searches by steps; the engine answers other searches.

    The front end holds the output of an ordinary request, but only the engine knows what a search has found so far.
    """
    ids = [request_id] if isinstance(request_id, str) else list(request_id)
    for hook in ONLINE.get(self, {}).values():
        hook.cancel(ids)
    abort_request_readings(self, ids)
    is_internal = arguments_to_vllm(original, self, ids, *args, **kwargs)["internal"]
    if not (is_internal and isinstance(request_id, str)):  # vLLM's `generate` aborts like this when its client is gone
        searches = _async_llm_searches(self, are_internal=is_internal)
        keys = [*dict.fromkeys(chain(*(searches.get(id_, ()) for id_ in ids)))]
        ids = [id_ for id_ in ids if id_ not in searches]
        await self.engine_core.abort_requests_async(2 * keys)  # twice: see `finish_requests`
    await original(self, ids, *args, **kwargs)


@wraps_vllm("pause_generation", AsyncLLM)
async def async_llm_pause_generation(
    original: Callable[..., Awaitable[None]], self: AsyncLLM, *args: Any, **kwargs: Any
) -> None:
    """If a pause aborts all requests, also abort those not in the engine: searches by steps and requests being read."""
    if arguments_to_vllm(original, self, *args, **kwargs)["mode"] == "abort":
        for hook in ONLINE.get(self, {}).values():
            hook.cancel()
        abort_request_readings(self)
    await original(self, *args, **kwargs)


async def _async_llm_whole_outputs(
    outputs: AsyncGenerator[RequestOutput, None], tokenizer: Any
) -> AsyncGenerator[RequestOutput, None]:
    """The completed outputs of a search."""
    async with aclosing(outputs):
        async for output in outputs:
            yield await whole_answer(output, tokenizer)


def _async_llm_searches(engine: AsyncLLM, are_internal: bool) -> dict[str, list[str]]:
    """The engine's ids of searches, by the ids that clients gave, or by its own.

    Clients' ids that other requests share are left out.
    """
    states, own_ids = engine.output_processor.request_states, defaultdict[str, list[str]](list)
    for own_id, state in states.items():
        own_ids[own_id if are_internal else state.external_req_id].append(own_id)
    return {name: ids for name, ids in own_ids.items() if all(isinstance(states[id_], AnswerState) for id_ in ids)}
