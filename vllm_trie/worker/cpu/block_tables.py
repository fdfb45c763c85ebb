"""Staged writes to tensors, and the block tables and slot mappings of a batch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np
import torch

from vllm_trie.worker.cpu.inputs import steps
from vllm_trie.worker.cpu.replace import Array, kernel, replaces


@kernel("buffer_utils:_apply_write_kernel")
def apply_write(
    output: torch.Tensor, output_stride: Any, write_indices: Array, write_starts: Array, write_contents: Array,
    write_cu_lens: Array, write_group_ids: Array | None, multi_group: bool,
) -> None:  # fmt: skip
    """Write contents [C], piece by piece, into rows of a tensor [S] or [S, L], or of the block tables of some groups.

    Args:
        output, output_stride: The tensor; or the addresses of block tables, and their strides, by KV cache group.
    """
    if multi_group:
        addresses, num_rows = zip(output.tolist(), output_stride.tolist(), strict=True), int(write_indices.max()) + 1
        tensors = [table_at(address, num_rows, stride) for address, stride in addresses]
    else:
        tensors = [output.numpy().reshape(len(output), -1)]
    groups, first = repeat(0) if write_group_ids is None else write_group_ids.tolist(), 0
    pieces = write_indices.tolist(), write_starts.tolist(), write_cu_lens.tolist()
    for group, row, start, end in zip(groups, *pieces, strict=False):
        tensors[group][row, start : start + end - first] = write_contents[first:end]
        first = end


def table_at(address: int, num_rows: int, stride: int) -> Array:
    """[rows, columns] int32, a block table in memory."""
    memory = (ctypes.c_int32 * int(num_rows * stride)).from_address(address)
    return np.ctypeslib.as_array(memory).reshape(num_rows, stride)


@replaces("block_table:BlockTables.gather_block_tables")
def gather_block_tables(
    self: Any, idx_mapping: torch.Tensor, num_reqs_padded: int, out: Sequence[torch.Tensor] | None = None,
    out_ptrs: torch.Tensor | None = None, num_computed_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The block tables [R, B] of the slots in idx_mapping [R], one per KV cache group.

    Blocks that a window has left behind, as num_computed_tokens [S] says, become null blocks.
    """
    if self.num_kv_cache_groups == 0:
        return ()
    gathered = self.input_block_tables if out is None else out
    slots = idx_mapping.numpy()
    num_rows, widths = len(slots), self.num_blocks.np[:, slots].max(axis=1, initial=0)
    for group, (table, target, width) in enumerate(zip(self.block_tables, gathered, widths, strict=True)):
        blocks = target.numpy()
        blocks[:num_rows, :width] = table.gpu.numpy()[slots, :width]
        blocks[num_rows:num_reqs_padded] = 0
        if num_computed_tokens is not None and (reach := self._sliding_window_reach[group]):
            num_null = np.maximum(num_computed_tokens.numpy()[slots] - reach, 0) // self.block_sizes[group]
            blocks[:num_rows, :width][np.arange(width) < num_null[:, None]] = 0
    return tuple(table[:num_reqs_padded] for table in gathered)


@kernel("block_table:_compute_slot_mappings_kernel")
def compute_slot_mappings(
    idx_mapping: Array, query_start_loc: Array, pos: Array, block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor, block_sizes: torch.Tensor, slot_mapping_enabled: torch.Tensor,
    slot_mappings: Array,
) -> None:  # fmt: skip
    """Where in the KV cache each token of a batch goes, by KV cache group [G, T]; -1 for tokens that go nowhere."""
    num_rows, num_tokens = len(idx_mapping), int(query_start_loc[len(idx_mapping)])
    position, num_slots = pos[:num_tokens], int(idx_mapping.max(initial=0)) + 1
    of_token = idx_mapping if num_tokens == num_rows else np.repeat(idx_mapping, steps(query_start_loc[: num_rows + 1]))
    tables = zip(block_table_ptrs.tolist(), block_table_strides.tolist(), block_sizes.tolist(), strict=True)
    slot_mappings[:] = -1
    for mapping, (address, stride, block_size), is_enabled in zip(
        slot_mappings, tables, slot_mapping_enabled.tolist(), strict=True
    ):
        if is_enabled:
            column, offset = np.divmod(position, block_size)
            blocks = table_at(address, num_slots, stride)[of_token, column].astype(np.int64)
            mapping[:num_tokens] = np.where(of_token >= 0, blocks * block_size + offset, -1)
