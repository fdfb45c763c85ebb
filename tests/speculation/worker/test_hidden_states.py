"""Hidden states lie where vLLM's KV cache does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vllm_trie.speculation.worker import hidden_states
from vllm_trie.speculation.worker.hidden_states import DraftHiddenStates


def runner_of(may_sleep: bool) -> Any:
    speculator = object.__new__(EagleSpeculator)
    speculator.draft_attn_layer_names, speculator.model = {"head"}, None
    speculator.hidden_size, speculator.dtype = 4, torch.bfloat16
    groups = [SimpleNamespace(layer_names=["target"]), SimpleNamespace(layer_names=["head"])]
    return SimpleNamespace(
        kv_cache_config=SimpleNamespace(num_blocks=3, kv_cache_groups=groups),
        block_tables=SimpleNamespace(block_sizes=[16, 8]),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_cumem_allocator=may_sleep)),
        speculator=speculator,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize(("has_cuda", "may_sleep"), [(True, True), (True, False), (False, True)])
def test_engines_that_may_sleep_drop_them_with_the_kv_cache(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, may_sleep: bool
) -> None:
    pools, allocated_in, stock = list[str](), list[list[str]](), torch.zeros

    @contextmanager
    def use_memory_pool(tag: str) -> Iterator[None]:
        pools.append(tag)
        yield
        pools.clear()

    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        allocated_in.append([*pools])
        return stock(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(hidden_states, "current_platform", SimpleNamespace(is_cuda_alike=lambda: has_cuda))
    allocator = SimpleNamespace(use_memory_pool=use_memory_pool)
    monkeypatch.setattr(hidden_states, "get_mem_allocator_instance", lambda: allocator)
    states = DraftHiddenStates(runner_of(may_sleep))
    assert (states.layer, states.number, states.by_slot.shape) == ("head", 1, (24, 4))
    assert allocated_in == [["kv_cache"] if has_cuda and may_sleep else []]
