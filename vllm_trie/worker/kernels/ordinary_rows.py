"""Ordinary rows in the same batch as beams: gathers vLLM's inputs for sampling them, and scatters the results.

In torch `worker.rows.sub_batch` has both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_trie.worker.kernels import KernelVariants
from vllm_trie.worker.launches import cdiv

TILE = 256  # values that one program copies
NUM_FIELDS = 2, 3, 3  # of rows, of logits and of tokens
TYPES = *(torch.int64, torch.int32) * 3, torch.int64, torch.bool  # of the fields


def launch_take_rows(
    rows: torch.Tensor, logits: torch.Tensor, moved: torch.Tensor, tokens: torch.Tensor, fields: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """`sub_batch.take_batch_rows` by one launch."""
    counts = len(rows), len(logits), len(tokens)
    own = [field.new_empty(count) for field, count in zip(fields, np.repeat(counts, NUM_FIELDS).tolist(), strict=True)]
    words = [field.view(torch.int8) if field.dtype is torch.bool else field for field in (*fields, *own)]
    _take_rows_kernel[cdiv(max(counts), TILE),](rows, logits, moved, tokens, *counts, *words, tile_size=TILE)
    return own


def launch_put_sampled(
    rows: torch.Tensor, own: Sequence[torch.Tensor], sampled: torch.Tensor, counts: torch.Tensor, rejected: torch.Tensor
) -> None:
    """`sub_batch.put_sampled_rows` by one launch."""
    num_rows, width = own[0].shape
    num_programs = cdiv(num_rows * width, TILE)
    strides = own[0].stride(0), sampled.stride(0)
    _put_sampled_kernel[num_programs,](rows, num_rows, width, *own, *strides, sampled, counts, rejected, tile_size=TILE)


@triton.jit
def _take_in_kernel(source, own, at, index, mask):
    tl.store(own + index, tl.load(source + at, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_logits", "num_tokens"])
def _take_rows_kernel(
    rows, logits, moved, tokens, num_rows, num_logits, num_tokens, idx_mapping, seq_lens, expanded_idx_mapping,
    expanded_local_pos, logits_indices, input_ids, positions, is_padding, own_idx_mapping, own_seq_lens,
    own_expanded_idx_mapping, own_expanded_local_pos, own_logits_indices, own_input_ids, own_positions, own_is_padding,
    tile_size: tl.constexpr,
):  # fmt: skip
    """See `launch_take_rows`: a program per tile of rows, logits and tokens.

    Args:
        rows: [R].
        logits: [N].
        moved: [N].
        tokens: [T].
    """
    index = tl.program_id(0) * tile_size + tl.arange(0, tile_size)
    mask = index < num_rows
    at = tl.load(rows + index, mask=mask, other=0)
    _take_in_kernel(idx_mapping, own_idx_mapping, at, index, mask)
    _take_in_kernel(seq_lens, own_seq_lens, at, index, mask)
    mask = index < num_logits
    at = tl.load(logits + index, mask=mask, other=0)
    _take_in_kernel(expanded_idx_mapping, own_expanded_idx_mapping, at, index, mask)
    _take_in_kernel(expanded_local_pos, own_expanded_local_pos, at, index, mask)
    token = tl.load(logits_indices + at, mask=mask) + tl.load(moved + index, mask=mask)
    tl.store(own_logits_indices + index, token, mask=mask)
    mask = index < num_tokens
    at = tl.load(tokens + index, mask=mask, other=0)
    _take_in_kernel(input_ids, own_input_ids, at, index, mask)
    _take_in_kernel(positions, own_positions, at, index, mask)
    _take_in_kernel(is_padding, own_is_padding, at, index, mask)


@triton.jit(
    do_not_specialize=["num_rows", "width", "own_stride", "sampled_stride"],
    do_not_specialize_on_alignment=["own_counts", "own_rejected"],
)
def _put_sampled_kernel(
    rows, num_rows, width, own_sampled, own_counts, own_rejected, own_stride, sampled_stride, sampled, counts, rejected,
    tile_size: tl.constexpr,
):  # fmt: skip
    """See `launch_put_sampled`: a program per tile of tokens.

    Args:
        rows: [R].
        own_sampled: [R, width].
        own_counts: [R].
        own_rejected: [R].
    """
    index = tl.program_id(0) * tile_size + tl.arange(0, tile_size)
    row, column, mask = index // width, index % width, index < num_rows * width
    at = tl.load(rows + row, mask=mask, other=0)
    tokens = tl.load(own_sampled + row * own_stride + column, mask=mask)
    tl.store(sampled + at * sampled_stride + column, tokens.to(tl.int64), mask=mask)
    mask = mask & (column == 0)
    tl.store(counts + at, tl.load(own_counts + row, mask=mask), mask=mask)
    tl.store(rejected + at, tl.load(own_rejected + row, mask=mask), mask=mask)


def warm_up_kernels(serving: KernelVariants) -> None:
    """Gathers and scatters one row."""
    fields = [torch.zeros(1, dtype=dtype, device=serving.device) for dtype in TYPES]
    row, counts = fields[0], fields[1]
    launch_take_rows(row, row, row, row, fields)
    launch_put_sampled(row, (row[None], counts, counts), row.new_zeros(1, 1), counts.clone(), counts.clone())
