"""Recurrent states in the prefix cache, vLLM's "align" mode: column p of a row is its state after p+1 full blocks.

The last column is a row's current state. Models with states do not speculate, so each row's state covers exactly its
tokens.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import _mamba_chunk_scan_combined_fwd_cpu

from vllm_trie.worker.cpu.inputs import block_table_on_cpu
from vllm_trie.worker.cpu.replace import Array, replaces_on_cpu

MAMBA_UTILS = "vllm.v1.worker."
MAMBA_OPS = "vllm.model_executor.layers.mamba.ops."


@replaces_on_cpu("mamba_utils:preprocess_mamba_align_fused_kernel", MAMBA_UTILS, "model_states.mamba_hybrid")
def next_state_columns_on_cpu(
    idx_mapping: Array,
    state_idx: Array,
    num_computed_tokens: Array,
    query_start_loc: Array,
    num_accepted_tokens: Array,
    src_col: Array,
    src_off: Array,
    num_reqs: int,
    mamba_block_size: int,
) -> None:
    """From which column a forward pass takes the state of each row in slots [R], and to which one it goes."""
    slots = idx_mapping[:num_reqs]
    src_col[slots], src_off[slots] = state_idx[slots], np.maximum(num_accepted_tokens[slots] - 1, 0)
    num_tokens = num_computed_tokens[slots] + np.diff(query_start_loc[: num_reqs + 1])
    state_idx[slots] = -(-num_tokens // mamba_block_size) - 1
    moves = (src_col[slots] >= 0) & (src_col[slots] != state_idx[slots])
    num_accepted_tokens[slots[moves]] = 1


@replaces_on_cpu("mamba_utils:precopy_mamba_align_fused_kernel", MAMBA_UTILS)
def copy_to_next_columns_on_cpu(
    mamba_state_idx: Array,
    src_col: Array,
    block_table_ptrs: Array,
    block_table_stride_req: int,
    state_base_addrs: Array,
    state_block_strides: Array,
    state_elem_sizes: Array,
    state_inner_sizes: Array,
    state_conv_widths: Array,
    state_group_indices: Array,
    state_dim_row_count: Array,
    state_dim_row_stride: Array,
    idx_mapping: Array,
    num_reqs: int,
) -> None:
    """Copies the states of rows whose forward pass writes another column to that column. Strides and sizes: bytes."""
    slots = idx_mapping[:num_reqs]
    slots = slots[(slots >= 0) & (src_col[slots] >= 0) & (src_col[slots] != mamba_state_idx[slots])]
    if not len(slots):
        return
    tables = [
        block_table_on_cpu(address, slots.max() + 1, block_table_stride_req) for address in block_table_ptrs.tolist()
    ]
    sizes = state_elem_sizes * state_inner_sizes * np.maximum(state_conv_widths, 1)
    sizes = np.where(state_dim_row_count > 0, state_dim_row_count * state_dim_row_stride, sizes)
    for base, stride, size, group in zip(
        *(of_states.tolist() for of_states in (state_base_addrs, state_block_strides, sizes, state_group_indices)),
        strict=True,
    ):
        sources, destinations = (tables[group][slots, at[slots]].tolist() for at in (src_col, mamba_state_idx))
        for source, destination in zip(sources, destinations, strict=True):
            ctypes.memmove(base + stride * destination, base + stride * source, size)


@replaces_on_cpu("mamba_utils:postprocess_mamba_fused_kernel", MAMBA_UTILS)
def keep_accepted_states_on_cpu() -> None:
    """Would undo what rejected drafts did to states; without speculation there are none."""


@replaces_on_cpu("mamba_utils:MambaSpecDecodeGPUContext.compute_aligned_state_indices", package=MAMBA_UTILS)
def last_state_blocks_on_cpu(self: Any, seq_lens: torch.Tensor, num_reqs: int) -> torch.Tensor:
    """[groups, R, 1] int32, the block with the state of each row, by KV cache group of states."""
    columns = torch.clamp((seq_lens[:num_reqs] - 1) // self.block_size, min=0).numpy()
    for number, address in enumerate(self.aligned_index_block_table_ptrs.tolist()):
        table = block_table_on_cpu(address, num_reqs, self.block_table_stride_req)
        self.aligned_state_indices[number, :num_reqs, 0] = torch.from_numpy(table[np.arange(num_reqs), columns])
    return self.aligned_state_indices[:, :num_reqs]


@replaces_on_cpu("ssd_combined:_mamba_chunk_scan_combined_fwd", package=MAMBA_OPS)
def scan_states_on_cpu(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    chunk_size: int,
    out: torch.Tensor,
    return_intermediate_states: bool = False,
    **options: Any,
) -> torch.Tensor:
    """The states after each sequence [R, ...], or after each chunk [chunks, ...], which vLLM's CPU kernel lacks."""
    stock = _mamba_chunk_scan_combined_fwd_cpu
    if not return_intermediate_states:
        return stock(x, dt, a, b, c, chunk_size, out, **options)
    ends, rows = options["cu_chunk_seqlens"].tolist(), options["seq_idx"].tolist()
    initial, states = options["initial_states"], list[torch.Tensor]()
    for number, row in enumerate(rows):
        at, before = slice(*ends[number : number + 2]), states[-1:]
        if number == 0 or row != rows[number - 1]:
            before = [] if initial is None else [initial[row]]
        options |= {"initial_states": torch.stack(before) if before else None}
        options |= {"cu_seqlens": torch.tensor([0, at.stop - at.start])}
        states.append(stock(x[at], dt[at], a, b[at], c[at], chunk_size, out[at], **options)[0])
    return torch.stack(states)


@replaces_on_cpu("ssd_checkpoint:_store_prefill_checkpoint_kernel", MAMBA_OPS)
def keep_checkpoints_on_cpu(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    chunk_states: torch.Tensor,
    ssm_state: torch.Tensor,
    query_start_loc: Array,
    checkpoint_offsets: Array,
    state_indices: Array,
    chunk_idx: Array,
    state_len: int,
) -> None:
    """Writes a prompt's state at its checkpoint, within what one forward pass computes, into a block."""
    (rows,) = np.nonzero(checkpoint_offsets)
    for row in rows:
        end, block = query_start_loc[row] + checkpoint_offsets[row], int(state_indices[row])
        conv_state[block, :, :state_len] = x[:, end - state_len : end]
        ssm_state[block] = chunk_states[int(chunk_idx[row])]
