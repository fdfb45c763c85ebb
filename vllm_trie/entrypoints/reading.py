"""Requests that bring sets of items or phrases are read in a thread, and a server serves others meanwhile.

These come as texts, which are parsed, tokenised and sorted. vLLM's threads do the same with prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from copy import copy, deepcopy
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerFast
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_trie.entrypoints.request_data import BRINGS, READ, RequestData
from vllm_trie.entrypoints.requests import forget_unsent, read_request
from vllm_trie.options.request import asks_for_beams


class _Reader:
    """Reads requests one after the other: a second thread would wait for Python's lock.

    Args:
        tokenizer: The engine's. One of Rust bears no two threads that set it up differently, so this has a copy.
    """

    def __init__(self, tokenizer: Any) -> None:
        is_shared = isinstance(tokenizer, PreTrainedTokenizerFast)
        self.tokenizer = deepcopy(tokenizer) if is_shared else tokenizer
        self.thread = ThreadPoolExecutor(1, "trie_beam_reader")


_readers: WeakKeyDictionary[AsyncLLM, _Reader] = WeakKeyDictionary()


def brings_data(params: Any) -> bool:
    """Whether reading a request may take longer than others should wait."""
    extra_args = (params.extra_args if isinstance(params, SamplingParams) else None) or {}
    return asks_for_beams(extra_args) and any(name in extra_args for name in BRINGS)


async def generate_once_read(
    generate: Callable[..., AsyncGenerator[RequestOutput, None]],
    engine: AsyncLLM,
    prompt: Any,
    params: SamplingParams,
    *args: Any,
    **kwargs: Any,
) -> AsyncGenerator[RequestOutput, None]:
    """vLLM's `generate`, of a request that is read in a thread first."""
    processor = engine.input_processor
    if (reader := _readers.get(engine)) is None:
        reader = _readers[engine] = _Reader(processor.tokenizer)
    loop = asyncio.get_running_loop()
    try:
        data = await loop.run_in_executor(reader.thread, read_request, params, processor, reader.tokenizer)
    except BaseException:  # a refusal, or a client that goes away
        forget_unsent(processor, prompt)
        raise
    if data is not None:
        params = _with(data, params)
    async with aclosing(generate(engine, prompt, params, *args, **kwargs)) as outputs:
        async for output in outputs:
            yield output


def _with(data: RequestData, params: SamplingParams) -> SamplingParams:
    """A request with what was read, in place of the texts that it was read from."""
    others = {name: value for name, value in (params.extra_args or {}).items() if name not in BRINGS}
    params = copy(params)
    params.extra_args = {**others, READ: data}
    return params
