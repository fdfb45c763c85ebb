"""Wraps `LLMEngine`, the engine of `LLM`: hooks handle some requests; `llm_engine_step` gives them their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from vllm.v1.engine.llm_engine import LLMEngine

from vllm_trie.compat.patch import wrap_vllm, wraps_vllm
from vllm_trie.entrypoints.answers.search_state import AnswerState
from vllm_trie.entrypoints.output_hooks import OFFLINE


@wraps_vllm("add_request", LLMEngine)
def llm_engine_add_request(
    original: Callable[..., str], self: LLMEngine, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> str:
    if (hook := OFFLINE.of_request(self, params)) is None:
        return original(self, request_id, prompt, params, *args, **kwargs)
    wrap_vllm("vllm_trie.entrypoints.llm_engine_step")
    return hook.add_request(original, self, request_id, prompt, params, *args, **kwargs)


@wraps_vllm("abort_request", LLMEngine)
def llm_engine_abort_request(
    original: Callable[..., None], self: LLMEngine, request_ids: Iterable[str], *args: Any, **kwargs: Any
) -> None:
    """Also abort requests of hooks, which users know by their own ids, and the engine's core by others."""
    request_ids = list(request_ids)
    if hooks := OFFLINE.get(self):
        states, parents = self.output_processor.request_states, self.output_processor.parent_requests
        own = [of[id_] for of in (states, parents) for id_ in request_ids if id_ in of]
        named = {*request_ids, *(request.external_req_id for request in own)}
        for hook in hooks.values():
            request_ids += hook.abort(self, named)
    original(self, request_ids, *args, **kwargs)


def llm_engine_abort_all(engine: LLMEngine) -> None:
    """Abort all requests, also those of hooks whose outputs were lost in an interrupted step."""
    waiting = chain(*(hook.waiting for hook in OFFLINE.get(engine, {}).values()))
    engine.abort_request([*engine.output_processor.request_states, *waiting], internal=True)


@wraps_vllm("get_num_unfinished_requests", LLMEngine)
def llm_engine_count_unfinished(original: Callable[..., int], self: LLMEngine, *args: Any, **kwargs: Any) -> int:
    """Count each request as often as it has outputs."""
    states = self.output_processor.request_states.values()
    num_others = sum(state.n - 1 for state in states if isinstance(state, AnswerState))
    num_others += sum(hook.num_more_outputs() for hook in OFFLINE.get(self, {}).values())
    return original(self, *args, **kwargs) + num_others
