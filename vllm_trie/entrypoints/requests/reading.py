"""Reads requests that bring sets of items or phrases in a thread, while a server serves others.

These texts are parsed, tokenized and sorted. vLLM's own threads do the same with prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Container
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerFast
from vllm.outputs import RequestOutput
from vllm.renderers.inputs.preprocess import extract_prompt_components
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor

from vllm_trie.engine.hypothesis import NO_HYPOTHESES
from vllm_trie.engine.outputs import compact_engine_answer
from vllm_trie.entrypoints.answers.beam_results import BEAM_RESULTS
from vllm_trie.entrypoints.answers.search_state import empty_answer_outputs
from vllm_trie.entrypoints.requests.request_data import BRINGS, RequestData
from vllm_trie.entrypoints.requests.requests import forget_unsent_request, read_request
from vllm_trie.messages import NO_HYPOTHESIS
from vllm_trie.options import PLUGIN_NAME
from vllm_trie.options.request import options_ask_for_beams


class _AbortedError(Exception):
    """A request was aborted while it was being read."""


class _RequestReader:
    """Reads requests one after the other: a second thread would only wait for Python's lock.

    Args:
        tokenizer: Of the engine. A Rust tokenizer is copied, as two threads must not configure it differently.
    """

    def __init__(self, tokenizer: Any) -> None:
        is_shared = isinstance(tokenizer, PreTrainedTokenizerFast)
        self._tokenizer = deepcopy(tokenizer) if is_shared else tokenizer
        self._thread = ThreadPoolExecutor(1, "trie_beam_reader")
        self._reading: dict[asyncio.Future[RequestData | None], str] = {}  # -> id of the request

    async def read(self, request_id: str, params: SamplingParams, processor: InputProcessor) -> RequestData | None:
        """Run `read_request` in the thread. Raises _AbortedError at once if the request is aborted."""
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self._thread, read_request, params, processor, self._tokenizer)
        self._reading[reading] = request_id
        try:
            await asyncio.wait([reading])
            if reading not in self._reading:
                raise _AbortedError
            return reading.result()
        finally:
            self._reading.pop(reading, None)
            reading.cancel()

    def abort(self, request_ids: Container[str] | None) -> None:
        """Abort requests that are being read or wait to be read: those with these ids, or all."""
        for reading, request_id in [*self._reading.items()]:
            if request_ids is None or request_id in request_ids:
                del self._reading[reading]
                reading.cancel()


_readers: WeakKeyDictionary[AsyncLLM, _RequestReader] = WeakKeyDictionary()


def request_brings_data(params: Any) -> bool:
    """Whether a request brings data that may take too long to read while others wait."""
    extra_args = (params.extra_args if isinstance(params, SamplingParams) else None) or {}
    return options_ask_for_beams(extra_args) and any(name in extra_args for name in BRINGS)


async def generate_once_request_read(
    generate: Callable[..., AsyncGenerator[RequestOutput, None]],
    engine: AsyncLLM,
    prompt: Any,
    params: SamplingParams,
    request_id: str,
    *args: Any,
    **kwargs: Any,
) -> AsyncGenerator[RequestOutput, None]:
    """vLLM's `generate` for a request that is first read in a thread."""
    processor = engine.input_processor
    if (reader := _readers.get(engine)) is None:
        reader = _readers[engine] = _RequestReader(processor.tokenizer)
    try:
        data = await reader.read(request_id, params, processor)
    except BaseException as error:  # an abort, a refusal, or a client that goes away
        forget_unsent_request(processor, prompt)
        if not isinstance(error, _AbortedError):
            raise
        yield _aborted_request_reading(request_id, prompt, params, engine)
        return
    if data is not None:
        params = data.instead_of_texts(params)
    async with aclosing(generate(engine, prompt, params, request_id, *args, **kwargs)) as outputs:
        async for output in outputs:
            yield output


def abort_request_readings(engine: AsyncLLM, request_ids: Container[str] | None = None) -> None:
    """Abort requests that are still being read and so not in the engine: those with these ids, or all."""
    if (reader := _readers.get(engine)) is not None:
        reader.abort(request_ids)


def _aborted_request_reading(request_id: str, prompt: Any, params: SamplingParams, engine: AsyncLLM) -> RequestOutput:
    """The answer of a search that is aborted before it begins, as the engine would give it, but without a trace."""
    reasons = (None if index == 0 else NO_HYPOTHESIS for index in range(params.n))
    outputs = empty_answer_outputs(params, "abort", reasons)
    asked = params.extra_args or {}
    answer = compact_engine_answer(NO_HYPOTHESES, max_length=0) if asked.get("compact") else {}
    answer |= {"item_ids": []} if {"allowed_sequences", "exclude_items"} & asked.keys() else {}
    answer |= {BEAM_RESULTS: []} if asked.get(BEAM_RESULTS) else {}
    is_whole = isinstance(prompt, str | list | dict)
    text, tokens, _ = extract_prompt_components(engine.model_config, prompt) if is_whole else (None, None, None)
    more = {PLUGIN_NAME: answer} if answer else None
    return RequestOutput(request_id, text, tokens, None, outputs, finished=True, kv_transfer_params=more)
