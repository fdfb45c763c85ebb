"""Attention over shared blocks by our kernels, of tokens and of trees: against torch, and timed.

Beside them the same kernels that share nothing; of trees also xformers' `tree_attention`, where that is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gpu_kernels import BLOCK_SIZE, HEAD_SIZE, KV_HEADS, device_us
from vllm_trie.worker.attention.shared_rows import RowTrees, Scoring, SharedRows, row_by_row, tokens_of
from vllm_trie.worker.attention.triton_kernels import Plan

QUERIES_PER_KV_HEAD = 4
OWN_TOKENS = 40
WIDTHS, PREFIXES = (16, 128, 512), (256, 1024, 4096, 16384)
TREE_WIDTHS, TREE_PREFIXES, NUM_NODES = (16, 128), (1024, 4096), (7, 31)  # of binary trees
NUM_CHECKED, TOLERANCE = 4, 2e-2  # rows; of numbers of 8 bits
COLUMNS = ("beams x prefix", "row by row, us", "shared blocks once, us", "times faster")
SETTING = (
    f"one layer, bfloat16, {KV_HEADS * QUERIES_PER_KV_HEAD} heads of {HEAD_SIZE} on {KV_HEADS}, block size "
    f"{BLOCK_SIZE}, {OWN_TOKENS} tokens of each row's own"
)
NOTE = f"{SETTING}; row by row: the same kernels, told that nothing is shared"
TREE_COLUMNS = ("beams x nodes x prefix", *COLUMNS[1:], "xformers, us")
TREE_NOTE = (
    f"{SETTING} and its tree; row by row: the nodes of a tree share what comes before it, the rows share nothing; "
    "xformers' tree_attention takes one tree for all rows, and the prefix once for each row"
)


class Shape(NamedTuple):
    width: int
    num_prefix: int
    num_kv_heads: int = KV_HEADS
    head_size: int = HEAD_SIZE
    num_nodes: int = 1  # of the tree that each row computes


class Inputs:
    """One group in one step, its blocks in any order."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        width, num_prefix, num_kv_heads, head_size, num_nodes = shape
        self.start, self.length = num_prefix + OWN_TOKENS - 1, num_prefix + OWN_TOKENS - 1 + num_nodes
        num_heads, num_own = QUERIES_PER_KV_HEAD * num_kv_heads, -(-(self.length - num_prefix) // BLOCK_SIZE)
        shared, num_blocks = num_prefix // BLOCK_SIZE, num_prefix // BLOCK_SIZE + width * num_own
        random = torch.Generator(device).manual_seed(0)
        on: dict[str, Any] = {"device": device, "dtype": dtype, "generator": random}
        self.cache = torch.randn(num_blocks, num_kv_heads, BLOCK_SIZE, 2 * head_size, **on)
        self.queries = torch.randn(width * num_nodes, num_heads, head_size, **on)
        blocks = torch.randperm(num_blocks, device=device, generator=random).int()
        prefix, own = blocks[:shared].repeat(width, 1), blocks[shared:].view(width, num_own)
        self.tables, self.scale = torch.hstack([prefix, own]), head_size**-0.5
        lengths, starts = np.full(width, self.length), np.arange(width + 1) * num_nodes
        self.tree = binary_tree(num_nodes)
        rows, apart = SharedRows(np.arange(width), num_prefix), [SharedRows(np.arange(width), 0)]
        if num_nodes > 1:
            rows = rows._replace(trees=RowTrees(self.start, [self.tree] * width))
            apart = row_by_row([rows])
        plans = [tokens_of(groups, starts, lengths, BLOCK_SIZE) for groups in ([rows], apart)]
        self.once, self.row_by_row = (
            Plan(shared, torch.from_numpy(shared.lengths).to(device), self.tables, (num_heads, num_kv_heads))
            for shared in plans
        )

    def attend(self, plan: Plan) -> torch.Tensor:
        outputs = torch.empty_like(self.queries)
        plan.attend(self.queries, outputs, self.cache, Scoring(self.scale))
        return outputs

    def reference(self) -> torch.Tensor:
        """[rows, nodes, heads, head size] float32, of the first NUM_CHECKED rows."""
        num_nodes, rows = len(self.tree), []
        sees = np.hstack([np.ones((num_nodes, self.start), dtype=bool), self.tree])
        hidden = torch.from_numpy(~sees).to(self.queries.device)
        by_row = self.queries.unflatten(0, (-1, num_nodes))[:NUM_CHECKED].float()
        for queries, of_row in zip(by_row, self.by_row(NUM_CHECKED).float(), strict=True):
            keys, values = of_row.repeat_interleave(QUERIES_PER_KV_HEAD, dim=1).chunk(2, dim=-1)
            scores = (torch.einsum("qhd,khd->hqk", queries, keys) * self.scale).masked_fill(hidden, -torch.inf)
            rows.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        return torch.stack(rows)

    def by_row(self, count: int) -> torch.Tensor:
        """[rows, length, KV heads, 2 * head size], the keys and values of the first `count` rows."""
        return self.cache[self.tables[:count].long()].transpose(2, 3).flatten(1, 2)[:, : self.length]


def binary_tree(num_nodes: int) -> np.ndarray:
    """[nodes, nodes] bool, what each node sees, layer by layer."""
    sees = np.eye(num_nodes, dtype=bool)
    for node in range(1, num_nodes):
        sees[node] |= sees[(node - 1) // 2]
    return sees


def check(inputs: Inputs, tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError where kernels and torch differ."""
    reference = inputs.reference()
    for plan in (inputs.once, inputs.row_by_row):
        found = inputs.attend(plan).unflatten(0, (-1, len(inputs.tree)))
        difference = (found[:NUM_CHECKED].float() - reference).abs().max().item()
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


def by_xformers(inputs: Inputs) -> Callable[[], torch.Tensor]:
    """What computes the same trees by xformers: [rows, nodes, KV heads, queries of each, head size]."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalPaddedKeysMask
    from xformers.ops.tree_attention import tree_attention

    width, num_nodes = len(inputs.tables), len(inputs.tree)
    queries = inputs.queries.unflatten(0, (width, num_nodes)).unflatten(2, (-1, QUERIES_PER_KV_HEAD))
    before, of_trees = inputs.by_row(width).unsqueeze(3).split([inputs.start, num_nodes], dim=1)
    heads = (-1, -1, -1, QUERIES_PER_KV_HEAD, -1)
    keys_and_values = [part.contiguous().expand(heads) for both in (of_trees, before) for part in both.chunk(2, dim=-1)]
    bias = torch.zeros(num_nodes, num_nodes, device=queries.device, dtype=queries.dtype)
    bias.masked_fill_(torch.from_numpy(~inputs.tree).to(bias.device), -torch.inf)
    lengths = {"q_seqlen": [num_nodes] * width, "kv_seqlen": [inputs.start] * width, "kv_padding": inputs.start}
    prefix_bias = BlockDiagonalPaddedKeysMask.from_seqlens(**lengths)
    return partial(tree_attention, queries, *keys_and_values, bias, prefix_bias)


def by_tree(device: torch.device) -> Iterator[tuple[Any, ...]]:
    """A row of `TREE_COLUMNS` per width, tree and prefix, all checked."""
    for width in TREE_WIDTHS:
        for num_nodes in NUM_NODES:
            for num_prefix in TREE_PREFIXES:
                inputs = Inputs(Shape(width, num_prefix, num_nodes=num_nodes), device)
                check(inputs)
                plain = device_us([partial(inputs.attend, inputs.row_by_row)])
                once = device_us([partial(inputs.attend, inputs.once)])
                theirs: float | str = "-"
                if find_spec("xformers") is not None:
                    run = by_xformers(inputs)
                    torch.testing.assert_close(
                        run().flatten(2, 3).flatten(0, 1), inputs.attend(inputs.once), rtol=TOLERANCE, atol=TOLERANCE
                    )
                    theirs = device_us([run])
                yield f"{width} x {num_nodes} x {num_prefix}", plain, once, plain / once, theirs
                del inputs
                torch.cuda.empty_cache()
