"""`AsyncLLM`, which servers have: its requests may be searches by steps, and its outputs are completed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_trie.compat.patch import wraps
from vllm_trie.entrypoints.beam_results import asks_for_beam_results, with_beam_results
from vllm_trie.entrypoints.reading import brings_data, generate_once_read
from vllm_trie.entrypoints.server import is_served, raise_errors
from vllm_trie.entrypoints.single_tokens import asks_for_single_tokens, with_single_tokens
from vllm_trie.entrypoints.step_search.online import Draw, cancel_searches, search
from vllm_trie.entrypoints.step_search.opening import asks_for_steps
from vllm_trie.entrypoints.trace_texts import is_traced, with_texts
from vllm_trie.selection import has_beams


@wraps("generate", AsyncLLM)
def generate(
    original: Draw, self: AsyncLLM, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
) -> AsyncGenerator[RequestOutput, None]:
    tokenizer, is_parsed = self.renderer.tokenizer, asks_for_single_tokens(sampling_params)
    if asks_for_steps(sampling_params) and has_beams(self.vllm_config):
        outputs = search(original, self, prompt, sampling_params, request_id, *args, **kwargs)
        return with_single_tokens(outputs, sampling_params, tokenizer) if is_parsed else outputs
    generate = partial(generate_once_read, original) if brings_data(sampling_params) else original
    outputs = generate(self, prompt, sampling_params, request_id, *args, **kwargs)
    outputs = with_texts(outputs, tokenizer) if is_traced(sampling_params) else outputs
    outputs = with_beam_results(outputs) if asks_for_beam_results(sampling_params) else outputs
    outputs = with_single_tokens(outputs, sampling_params, tokenizer) if is_parsed else outputs
    return raise_errors(outputs) if is_served(sampling_params) else outputs


@wraps("abort", AsyncLLM)
async def abort(
    original: Callable[..., Awaitable[None]], self: AsyncLLM, request_id: str | Iterable[str], *args: Any, **kwargs: Any
) -> None:
    """Abort searches by steps, too, which the engine knows nothing of."""
    ids = [request_id] if isinstance(request_id, str) else list(request_id)
    cancel_searches(self, ids)
    await original(self, ids, *args, **kwargs)
