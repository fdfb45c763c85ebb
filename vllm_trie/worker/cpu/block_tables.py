"""Staged writes to tensors, and the block tables and slot mappings of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_trie.worker.cpu.inputs import steps
from vllm_trie.worker.cpu.replace import replaces


@replaces("buffer_utils:StagedWriteTensor.apply_write")
def apply_write(self: Any) -> None:
    """Write all that is staged into rows of a tensor [S] or [S, L]."""
    values, contents, first = self.gpu.numpy().reshape(len(self.gpu), -1), self._staged_write_contents, 0
    staged = self._staged_write_indices, self._staged_write_starts, self._staged_write_cu_lens
    for row, start, end in zip(*staged, strict=True):
        values[row, start : start + end - first] = contents[first:end]
        first = end
    self.clear_staged_writes()


@replaces("buffer_utils:FusedStagedWriter.apply")
def apply_writes(self: Any, tensors: Sequence[Any], output_ptrs: torch.Tensor, output_strides: torch.Tensor) -> None:
    """Write all that is staged for several tensors."""
    for tensor in tensors:
        tensor.apply_write()


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


@replaces("block_table:BlockTables.compute_slot_mappings")
def compute_slot_mappings(
    self: Any, idx_mapping: torch.Tensor, query_start_loc: torch.Tensor, positions: torch.Tensor,
    num_tokens_padded: int, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Where in the KV cache each token of a batch goes, by KV cache group [G, T]; -1 for tokens that go nowhere."""
    slot_mappings = self.slot_mappings if out is None else out
    slots, starts = idx_mapping.numpy(), query_start_loc.numpy()
    num_tokens = int(starts[len(slots)])
    position = positions.numpy()[:num_tokens]
    of_token = slots if num_tokens == len(slots) else np.repeat(slots, steps(starts[: len(slots) + 1]))
    for group, block_size in enumerate(self.block_sizes):
        mapping = slot_mappings[group].numpy()
        mapping[: max(num_tokens_padded, num_tokens)] = -1
        if self._slot_mapping_enabled[group]:
            column, offset = np.divmod(position, block_size)
            blocks = self.block_tables[group].gpu.numpy()[of_token, column].astype(np.int64)
            mapping[:num_tokens] = np.where(of_token >= 0, blocks * block_size + offset, -1)
    return slot_mappings[:, :num_tokens_padded]
