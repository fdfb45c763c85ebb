"""Allocates what accepted drafts take, so that vLLM's memory profiling leaves room for it next to the KV cache."""

from __future__ import annotations

import torch
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vllm_trie.speculative_config import speculative_config_layers


def take_widest_draft_move(runner: GPUModelRunner) -> None:
    """Allocates as much as drafts that all rows accept take: their keys and values, and their hidden states."""
    config, speculator = runner.vllm_config, runner.speculator
    specs = [spec for spec in runner.get_kv_cache_spec().values() if isinstance(spec, AttentionSpec)]
    per_token = sum(-(-spec.page_size_bytes // spec.block_size) for spec in specs)
    if isinstance(speculator, EagleSpeculator):
        per_token += speculator.hidden_size * speculator.dtype.itemsize
    num_tokens = config.scheduler_config.max_num_seqs * speculative_config_layers(config)
    torch.empty(num_tokens * per_token, dtype=torch.uint8, device=runner.device)
