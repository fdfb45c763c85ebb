"""For rows with logits processors: reads what processors need, and copies counts when rows fork, one launch each.

In torch `worker.select.select` does the former, and `worker.rows.rows` the latter.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_trie.worker.kernels import KernelVariants
from vllm_trie.worker.kv.kv_moves import KVFork
from vllm_trie.worker.launches import cdiv

TILE = 256  # rows whose newest tokens one program reads
COUNTS_TILE = 4096  # counts that one program copies


def launch_take_newest(
    at: torch.Tensor, logits_indices: torch.Tensor, positions: torch.Tensor, input_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Position and id of the newest token before some logits.

    Args:
        at: [N] int64, indices of these logits in the batch.
        logits_indices: [logits] int64, the batch's token that each of the logits follows.
        positions: [tokens] int64.
        input_ids: [tokens] int32.

    Returns:
        [N] each.
    """
    count = len(at)
    own = positions.new_empty(count), input_ids.new_empty(count)
    _take_newest_kernel[cdiv(count, TILE),](at, count, logits_indices, positions, input_ids, *own, tile_size=TILE)
    return own


def launch_reorder_counts(rows: KVFork, counts: torch.Tensor) -> None:
    """Copies to rows how often each token has occurred in the histories that they continue.

    Args:
        rows: R of them.
        counts: [slots, V] int32.
    """
    num_rows, vocab_size = len(rows.num_tokens_on_host), counts.shape[1]
    _reorder_counts_kernel[num_rows, cdiv(vocab_size, COUNTS_TILE)](
        rows.rows, rows.parents, num_rows, counts, counts.stride(0), vocab_size, tile_size=COUNTS_TILE
    )


@triton.jit(do_not_specialize=["count"])
def _take_newest_kernel(
    at, count, logits_indices, positions, input_ids, own_positions, own_input_ids, tile_size: tl.constexpr
):  # fmt: skip
    """See `launch_take_newest`: a program per tile of rows."""
    index = tl.program_id(0) * tile_size + tl.arange(0, tile_size)
    mask = index < count
    newest = tl.load(logits_indices + tl.load(at + index, mask=mask, other=0), mask=mask, other=0)
    tl.store(own_positions + index, tl.load(positions + newest, mask=mask), mask=mask)
    tl.store(own_input_ids + index, tl.load(input_ids + newest, mask=mask), mask=mask)


@triton.jit(
    do_not_specialize=["num_rows", "counts_stride", "vocab_size"], do_not_specialize_on_alignment=["rows", "parents"]
)
def _reorder_counts_kernel(rows, parents, num_rows, counts, counts_stride, vocab_size, tile_size: tl.constexpr):
    """See `launch_reorder_counts`: a program per row and tile of the vocabulary.

    Args:
        rows: [4, R], see `KVFork`.
        parents: [R].
    """
    row = tl.program_id(0)
    slot = tl.load(rows + row)
    source = tl.load(rows + tl.load(rows + num_rows + row) + tl.load(parents + row))
    if slot != source:
        token = tl.program_id(1) * tile_size + tl.arange(0, tile_size)
        mask = token < vocab_size
        taken = tl.load(counts + source * counts_stride + token, mask=mask)
        tl.store(counts + slot * counts_stride + token, taken, mask=mask)


def warm_up_kernels(serving: KernelVariants) -> None:
    """Reads the newest token of one row, which continues itself."""
    nothing = torch.zeros(4, 1, dtype=torch.int64, device=serving.device)
    launch_take_newest(nothing[0], nothing[0], nothing[0], nothing[0].int())
    counts = torch.zeros(1, 1, dtype=torch.int32, device=serving.device)
    launch_reorder_counts(KVFork(nothing, nothing[0], np.zeros(1, np.int64)), counts)
