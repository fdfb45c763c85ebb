"""What vLLM keeps per slot of models with recurrent states, and how it zeroes KV blocks beside these."""

from __future__ import annotations

import ctypes

import numpy as np

from vllm_trie.worker.cpu.replace import Array, kernel

WORD_BYTES = 4  # in which strides and sizes of segments are given


@kernel("model_states.mamba_hybrid:_scatter_num_accepted_kernel")
def scatter_num_accepted(idx_mapping: Array, num_sampled: Array, num_accepted: Array) -> None:
    """How many tokens each row took in, at least one; rows in slot -1 are left out."""
    real = idx_mapping >= 0
    num_accepted[idx_mapping[real]] = np.maximum(num_sampled[real], 1)


@kernel("model_states.mamba_hybrid:_fill_num_accepted_kernel")
def fill_num_accepted(idx_mapping: Array, num_accepted: Array, num_sampled: int) -> None:
    """The same number for all rows."""
    num_accepted[idx_mapping[idx_mapping >= 0]] = num_sampled


@kernel("utils:_zero_kv_blocks_kernel", package="vllm.v1.worker.")
def zero_blocks(seg_addrs: Array, seg_block_strides: Array, seg_page_sizes: Array, block_ids: Array) -> None:
    """Zero these blocks in all segments, whose addresses are in bytes."""
    for address, stride, size in zip(
        seg_addrs.tolist(), seg_block_strides.tolist(), seg_page_sizes.tolist(), strict=True
    ):
        for block in block_ids.tolist():
            ctypes.memset(address + WORD_BYTES * stride * block, 0, WORD_BYTES * size)
