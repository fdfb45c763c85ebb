"""Attention of b rows that share a prefix: row by row, and the prefix once for all rows, merged; by xformers.

Somebody else's kernels, to tell what reading a shared prefix once saves; `gpu_attention` has ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_kernels import HEAD_SIZE, KV_HEADS, device_us

QUERIES_PER_KV_HEAD = 4
SUFFIX = 128
WIDTHS, PREFIXES = (4, 8, 16, 64), (1024, 4096, 16384)
COLUMNS = ("beams x prefix", "row by row, us", "prefix once, us", "times faster", "largest difference")
NOTE = (
    f"suffix {SUFFIX}, one layer, bfloat16, {KV_HEADS * QUERIES_PER_KV_HEAD} heads on {KV_HEADS}; row by row, each row "
    "has the prefix in memory of its own: vLLM's rows read the same blocks, which caches help, so it may be faster"
)
Attended = tuple[torch.Tensor, torch.Tensor]  # [B, M, G, H, K], and the log of its sum of exponentials, [B, M, G, H]


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Attended:
    """Attention without a mask. Queries: [B, M, G, H, K]; keys, values: [B, N, G, 1, K]."""
    from xformers.ops import memory_efficient_attention_forward_requires_grad

    heads = (-1, -1, -1, queries.shape[3], -1)
    out, lse = memory_efficient_attention_forward_requires_grad(queries, keys.expand(heads), values.expand(heads))
    return out, lse[..., : queries.shape[1]].permute(0, 3, 1, 2)  # xformers may pad it


def merged(prefix: Attended, suffix: Attended) -> torch.Tensor:
    """Attention to both of two parts, from attention to each."""
    lse = torch.logaddexp(prefix[1], suffix[1])
    return sum(out.float() * (own - lse).exp()[..., None] for out, own in (prefix, suffix)).to(prefix[0].dtype)


def prefix_once(queries: torch.Tensor, prefix: list[torch.Tensor], suffix: list[torch.Tensor]) -> torch.Tensor:
    """All rows as queries of one sequence, the prefix, and each of its own suffix. Queries: [b, 1, G, H, K]."""
    out, lse = attend(queries.transpose(0, 1), *prefix)
    return merged((out.transpose(0, 1), lse.transpose(0, 1)), attend(queries, *suffix))


def by_prefix(device: torch.device) -> Iterator[tuple[Any, ...]]:
    """A row of `COLUMNS` per width and prefix."""
    on: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    for width in WIDTHS:
        for length in PREFIXES:
            queries = torch.randn(width, 1, KV_HEADS, QUERIES_PER_KV_HEAD, HEAD_SIZE, **on)
            prefix = [torch.randn(1, length, KV_HEADS, 1, HEAD_SIZE, **on) for _ in range(2)]
            suffix = [torch.randn(width, SUFFIX, KV_HEADS, 1, HEAD_SIZE, **on) for _ in range(2)]
            pairs = zip(prefix, suffix, strict=True)
            whole = [torch.cat([common.expand(width, -1, -1, -1, -1), own], dim=1) for common, own in pairs]
            difference = (prefix_once(queries, prefix, suffix) - attend(queries, *whole)[0]).abs().max().item()
            plain = device_us([partial(attend, queries, *whole)])
            once = device_us([partial(prefix_once, queries, prefix, suffix)])
            yield f"{width} x {length}", plain, once, plain / once, difference
