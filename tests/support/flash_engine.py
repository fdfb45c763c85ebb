"""Engines on a CPU with the attention of GPUs: FlashAttention, done by torch, and in full CUDA graphs, recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

from tests.support.engine import Engine
from tests.support.flash_attention import flash_attn_varlen_func
from tests.support.recorded_graphs import as_kernel, recorded_graphs
from vllm_trie.worker import cpu_worker
from vllm_trie.worker.attention.gpu_backend import SharedPrefixAttentionBackend
from vllm_trie.worker.attention.split_batch import replace_attention_backend
from vllm_trie.worker.startup.shared_step_graphs import capture_shared_step_graphs


def schedule_of(lengths: torch.Tensor, starts: torch.Tensor, *bounds: int) -> torch.Tensor:
    """In the place of FlashAttention's schedule: what it is made of."""
    return torch.cat([torch.tensor(bounds, dtype=torch.int32), lengths, starts])


def get_scheduler_metadata(**of: Any) -> torch.Tensor:
    """As vLLM calls it: of paged keys and values, and of layers without windows."""
    assert of["batch_size"] == len(of["cache_seqlens"]) == len(of["cu_seqlens_q"]) - 1
    assert of["window_size"] == (-1, -1)
    bounds = of["max_seqlen_q"], of["causal"], of["num_splits"]
    return schedule_of(of["cache_seqlens"], of["cu_seqlens_q"], *bounds)


def attend(**options: Any) -> Any:
    """FlashAttention, which goes wrong by a schedule that is not of this very call."""
    if (schedule := options.get("scheduler_metadata")) is not None:
        names = "max_seqlen_q", "causal", "num_splits"
        expected = schedule_of(options["seqused_k"], options["cu_seqlens_q"], *map(options.__getitem__, names))
        assert torch.equal(schedule, expected)
    return flash_attn_varlen_func(**options)


def write_kv(key: Any, value: Any, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, *_: Any) -> None:
    """vLLM's `reshape_and_cache_flash`: tokens of no row have negative slots."""
    is_token = slots >= 0
    at = slots[is_token] // keys.shape[1], slots[is_token] % keys.shape[1]
    for cache, new in ((keys, key), (values, value)):
        cache[at] = new[: len(slots)][is_token]


@contextmanager
def flash_attention_on_cpu() -> Iterator[list[dict[str, Any]]]:
    """Within it, engines on CPUs have this backend, as if there were FlashAttention 3.

    Yields:
        What FlashAttention is asked, call by call, also by replays.
    """
    asked = list[dict[str, Any]]()

    def noted(**options: Any) -> Any:
        asked.append(options)
        return attend(**options)

    replace = lambda: replace_attention_backend(AttentionBackendEnum.CPU_ATTN, SharedPrefixAttentionBackend)  # noqa: E731
    with ExitStack() as stack:
        for target, name, value in (
            (flash_attn, "get_flash_attn_version", lambda **_: 3),
            (flash_attn, "flash_attn_varlen_func", as_kernel(noted)),
            (flash_attn, "reshape_and_cache_flash", as_kernel(write_kv)),
            (flash_attn, "get_scheduler_metadata", as_kernel(get_scheduler_metadata)),
            (flash_attn, "merge_attn_states", as_kernel(flash_attn.merge_attn_states)),
            (flash_attn.FlashAttentionMetadataBuilder, "_cudagraph_support", AttentionCGSupport.ALWAYS),
            (cpu_worker, "use_cpu_attention_backend", replace),
        ):
            stack.enter_context(patch.object(target, name, value, create=True))
        yield asked


@contextmanager
def full_graphs(engine: Engine, mode: CUDAGraphMode, sizes: list[int]) -> Iterator[ModelCudaGraphManager]:
    """Within it an engine has captured CUDA graphs of steps with so many rows, as vLLM does at an engine's start.

    Piecewise ones are the model itself.
    """
    runner, config = engine.runner, engine.core.vllm_config
    groups, stock = [*chain(*runner.attn_groups)], runner.cudagraph_manager
    of_graphs = {"cudagraph_mode": mode, "cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": sizes[-1]}
    builders = [group.metadata_builders for group in groups]
    with ExitStack() as stack:
        stack.enter_context(recorded_graphs())
        stack.enter_context(patch.object(cudagraph_utils, "has_compiled_submodule", lambda _: True))
        for name, value in of_graphs.items():
            stack.enter_context(patch.object(config.compilation_config, name, value))
        with set_current_vllm_config(config):
            for group in groups:
                of_blocks = runner.kernel_block_sizes[group.kv_cache_group_id]
                group.create_metadata_builders(config, runner.device, of_blocks)
        runner.cudagraph_manager = ModelCudaGraphManager(config, runner.device, mode, decode_query_len=1)
        capture_shared_step_graphs(runner)
        runner.cudagraph_manager.capture(
            runner.model,
            runner.model_state,
            runner.input_buffers,
            None,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
        )
        try:
            yield runner.cudagraph_manager
        finally:
            runner.cudagraph_manager = stock
            for group, of_group in zip(groups, builders, strict=True):
                group.metadata_builders = of_group
