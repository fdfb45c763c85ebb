"""Attention over shared blocks by our kernels: against torch, and timed beside the same kernels that share nothing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gpu_kernels import BLOCK_SIZE, HEAD_SIZE, KV_HEADS, device_us
from vllm_trie.worker.attention.shared_rows import SharedRows, tokens_of
from vllm_trie.worker.attention.triton_kernels import Plan

QUERIES_PER_KV_HEAD = 4
OWN_TOKENS = 40
WIDTHS, PREFIXES = (16, 128, 512), (256, 1024, 4096, 16384)
NUM_CHECKED, TOLERANCE = 4, 2e-2  # rows; of numbers of 8 bits
COLUMNS = ("beams x prefix", "row by row, us", "shared blocks once, us", "times faster")
NOTE = (
    f"one layer, bfloat16, {KV_HEADS * QUERIES_PER_KV_HEAD} heads of {HEAD_SIZE} on {KV_HEADS}, block size "
    f"{BLOCK_SIZE}, {OWN_TOKENS} tokens of each row's own; row by row: the same kernels, told that nothing is shared"
)


class Shape(NamedTuple):
    width: int
    num_prefix: int
    num_kv_heads: int = KV_HEADS
    head_size: int = HEAD_SIZE


class Inputs:
    """One group in one step, its blocks in any order."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        width, num_prefix, num_kv_heads, head_size = shape
        num_heads, num_own = QUERIES_PER_KV_HEAD * num_kv_heads, -(-OWN_TOKENS // BLOCK_SIZE)
        shared, num_blocks = num_prefix // BLOCK_SIZE, num_prefix // BLOCK_SIZE + width * num_own
        random = torch.Generator(device).manual_seed(0)
        on: dict[str, Any] = {"device": device, "dtype": dtype, "generator": random}
        self.cache = torch.randn(num_blocks, num_kv_heads, BLOCK_SIZE, 2 * head_size, **on)
        self.queries = torch.randn(width, num_heads, head_size, **on)
        blocks = torch.randperm(num_blocks, device=device, generator=random).int()
        prefix, own = blocks[:shared].repeat(width, 1), blocks[shared:].view(width, num_own)
        self.tables, self.length, self.scale = torch.hstack([prefix, own]), num_prefix + OWN_TOKENS, head_size**-0.5
        lengths, starts = np.full(width, self.length, np.int32), np.arange(width + 1, dtype=np.int32)
        heads, on_device = (num_heads, num_kv_heads), torch.from_numpy(lengths).to(device)
        self.once, self.row_by_row = (
            Plan(
                tokens_of([SharedRows(np.arange(width), num_shared)], starts, lengths, BLOCK_SIZE),
                on_device,
                self.tables,
                heads,
            )
            for num_shared in (num_prefix, 0)
        )

    def attend(self, plan: Plan) -> torch.Tensor:
        outputs = torch.empty_like(self.queries)
        plan.attend(self.queries, outputs, self.cache, self.scale)
        return outputs

    def reference(self) -> torch.Tensor:
        """[NUM_CHECKED, heads, head size] float32, of the first rows."""
        rows = []
        for query, table in zip(self.queries[:NUM_CHECKED].float(), self.tables, strict=False):
            of_row = self.cache[table.long()].float().transpose(1, 2).flatten(0, 1)[: self.length]
            keys, values = of_row.repeat_interleave(QUERIES_PER_KV_HEAD, dim=1).chunk(2, dim=-1)
            weights = (torch.einsum("hd,khd->hk", query, keys) * self.scale).softmax(-1)
            rows.append(torch.einsum("hk,khd->hd", weights, values))
        return torch.stack(rows)


def check(inputs: Inputs, tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError where kernels and torch differ."""
    reference = inputs.reference()
    for plan in (inputs.once, inputs.row_by_row):
        difference = (inputs.attend(plan)[:NUM_CHECKED].float() - reference).abs().max().item()
        assert difference <= tolerance, f"attention differs from torch by {difference:.2g}"


def by_prefix(device: torch.device) -> Iterator[tuple[Any, ...]]:
    """A row of `COLUMNS` per width and prefix, all checked."""
    for width in WIDTHS:
        for num_prefix in PREFIXES:
            inputs = Inputs(Shape(width, num_prefix), device)
            check(inputs)
            plain = device_us([partial(inputs.attend, inputs.row_by_row)])
            once = device_us([partial(inputs.attend, inputs.once)])
            yield f"{width} x {num_prefix}", plain, once, plain / once
            del inputs
            torch.cuda.empty_cache()
