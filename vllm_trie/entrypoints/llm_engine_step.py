"""Wraps `LLMEngine.step` once a request uses a hook: hooks take the outputs that belong to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.engine.llm_engine import LLMEngine

from vllm_trie.compat.patch import wraps_vllm
from vllm_trie.entrypoints.output_hooks import OFFLINE


@wraps_vllm("step", LLMEngine)
def llm_engine_step(original: Callable[..., list[Any]], self: LLMEngine, *args: Any, **kwargs: Any) -> list[Any]:
    outputs = original(self, *args, **kwargs)
    for hook in [*OFFLINE.get(self, {}).values()]:  # a scorer may call this engine, and so add a hook
        outputs = hook.take(self, outputs) if hook.waiting else outputs
    return outputs
