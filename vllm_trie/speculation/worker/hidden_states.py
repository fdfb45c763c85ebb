"""The hidden states that an EAGLE head reads, stored by KV slot.

For each token, an EAGLE head reads its embedding and the target's hidden states at the token before it. vLLM's own
drafting writes the KV of the pair (states of token i, token i + 1) into slot i. The last slot of a block then depends
on the token after the block, which may differ between beams that share the block. For groups, slot i holds the pair
(states of token i - 1, token i), which depends only on tokens up to i. Positions only count as distances, so the head
sees the pairs that it was trained on. The first token is paired with zeros.

The states themselves are also stored by slot, like one more layer of the KV cache: the target's for all tokens that it
has computed, and the head's for drafts, until the target computes these. So they are copied with blocks where beams
fork, and moved with tokens where drafts are accepted. A cached prefix has them, and so has a preempted group once it is
computed again. Only the part of a shared prefix that vLLM's own drafting has computed has other pairs; then fewer
drafts may be accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.device_allocator import get_mem_allocator_instance
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vllm_trie.compat.versions import planned_vllm_kv_cache
from vllm_trie.worker.kv.kv_caches import ByToken


class DraftHiddenStates:
    """The hidden states of all tokens in a runner's KV cache.

    Args:
        runner: A runner with an EAGLE-3 head, whose KV cache is allocated.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        config, speculator = runner.kv_cache_config, runner.speculator
        assert isinstance(speculator, EagleSpeculator)
        self._model = speculator.model
        self.layer, self.number = _draft_head_layer_of(speculator, config.kv_cache_groups)
        block_size = runner.block_tables.block_sizes[self.number]
        size = config.num_blocks, block_size, speculator.hidden_size
        with _memory_of_draft_states(runner.vllm_config):
            states = torch.zeros(size, dtype=speculator.dtype, device=runner.device)
        self.by_token = ByToken(states, (block_size,))
        self.by_slot = self.by_token.contents.flatten(0, 1)  # [slots, H], the same memory

    @torch.inference_mode()
    def keep(self, forward: Any) -> None:
        """Stores the states of all tokens that the target has computed; `forward` is vLLM's `ExecuteModelState`."""
        num_tokens = forward.input_batch.num_tokens
        slots = forward.slot_mappings_by_layer[self.layer][:num_tokens]
        states = torch.cat([of_layer[:num_tokens] for of_layer in forward.aux_hidden_states], dim=-1)
        self.by_slot[slots] = self._model.combine_hidden_states(states)


def _memory_of_draft_states(vllm_config: VllmConfig) -> AbstractContextManager[Any]:
    """A context whose allocations are dropped with vLLM's KV cache while an engine sleeps, and not copied."""
    if not (current_platform.is_cuda_alike() and vllm_config.model_config.enable_cumem_allocator):
        return nullcontext()
    return get_mem_allocator_instance().use_memory_pool(tag="kv_cache")


def _draft_head_layer_of(speculator: EagleSpeculator, groups: Sequence[KVCacheGroupSpec]) -> tuple[str, int]:
    """A layer of the head, and its KV cache group, whose slots index the states."""
    layer = min(speculator.draft_attn_layer_names)
    (number,) = (number for number, group in enumerate(groups) if layer in group.layer_names)
    return layer, number


def leave_room_for_drafts(runner: GPUModelRunner, num_bytes: int) -> int:
    """The share of `num_bytes` for vLLM's KV cache: as many blocks as fit together with the states of their tokens."""
    speculator = runner.speculator
    if not isinstance(speculator, EagleSpeculator):
        return num_bytes
    groups, of_kv = planned_vllm_kv_cache(runner.vllm_config, runner.get_kv_cache_spec())
    _, number = _draft_head_layer_of(speculator, groups)
    of_states = groups[number].kv_cache_spec.block_size * speculator.hidden_size * speculator.dtype.itemsize
    return num_bytes // (of_kv + of_states) * of_kv
