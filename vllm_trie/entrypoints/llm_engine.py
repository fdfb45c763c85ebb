"""`LLMEngine`, which `LLM` runs: its requests may be searches by steps, or reranked, and its outputs are completed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.engine.llm_engine import LLMEngine

from vllm_trie.compat.patch import wraps
from vllm_trie.entrypoints.beam_results import add_beam_results
from vllm_trie.entrypoints.reranking.offline import (
    add_reranked,
    asks_for_reranking,
    forget_reranked,
    num_left_out,
    rerank,
    reranked_of,
)
from vllm_trie.entrypoints.search_state import SearchState
from vllm_trie.entrypoints.step_search.offline import (
    abort_searches,
    add_search,
    go_on,
    num_more_outputs,
    searches_of,
)
from vllm_trie.entrypoints.step_search.opening import asks_for_steps
from vllm_trie.entrypoints.trace_texts import add_texts
from vllm_trie.selection import has_beams


@wraps("add_request", LLMEngine)
def add_request(
    original: Callable[..., str], self: LLMEngine, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> str:
    add: Callable[..., str] | None = None
    if asks_for_reranking(params):
        add = add_reranked
    elif asks_for_steps(params):
        add = add_search
    if add is None or not has_beams(self.vllm_config):
        return original(self, request_id, prompt, params, *args, **kwargs)
    return add(original, self, request_id, prompt, params, *args, **kwargs)


@wraps("step", LLMEngine)
def step(original: Callable[..., list[Any]], self: LLMEngine, *args: Any, **kwargs: Any) -> list[Any]:
    outputs = original(self, *args, **kwargs)
    add_texts(outputs, self.renderer.tokenizer)
    add_beam_results(outputs)
    rerank(self, outputs)
    return go_on(self, outputs)


@wraps("abort_request", LLMEngine)
def abort_request(
    original: Callable[..., None], self: LLMEngine, request_ids: Iterable[str], *args: Any, **kwargs: Any
) -> None:
    """Abort what is known by other ids, too: here by those of whoever asked, in the engine's core by its own."""
    request_ids = list(request_ids)
    states, parents = self.output_processor.request_states, self.output_processor.parent_requests
    own = [of[id_] for of in (states, parents) for id_ in request_ids if id_ in of]
    named = {*request_ids, *(request.external_req_id for request in own)}
    request_ids += forget_reranked(self, named)
    abort_searches(self, named)
    original(self, request_ids, *args, **kwargs)


def abort_all(engine: LLMEngine) -> None:
    """Abort all requests, and what waits for outputs that are lost, as a step that is interrupted returns none."""
    running = engine.output_processor.request_states
    engine.abort_request([*running, *searches_of(engine), *reranked_of(engine)], internal=True)


@wraps("get_num_unfinished_requests", LLMEngine)
def count_unfinished(original: Callable[..., int], self: LLMEngine, *args: Any, **kwargs: Any) -> int:
    """Requests count as the outputs that they will have."""
    states = self.output_processor.request_states.values()
    num_others = sum(state.n - 1 for state in states if isinstance(state, SearchState))
    return original(self, *args, **kwargs) + num_others + num_more_outputs(self) - num_left_out(self)
