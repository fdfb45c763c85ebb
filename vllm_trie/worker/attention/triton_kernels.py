"""Attention over shared blocks by Triton kernels.

The first kernel reads the blocks that all rows of a group share, for a tile of their queries at a time, in parts that
run in parallel. The second reads each token's own blocks, and begins with the sums that the first one left. A row's
newest tokens may be a tree, of which each token sees its ancestors and itself.
No autotuning and no atomics: ranks that compute the same get the same results.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_trie.search import search_spans
from vllm_trie.search.devices import uploaded_for_search
from vllm_trie.worker.attention.shared_rows import (
    WORD,
    Scoring,
    SharedAttentionTokens,
    device_first_attention_keys,
    first_attention_keys,
)
from vllm_trie.worker.launches import next_power_of_2

MOST_HEAD_SIZE = 256
TILE = 64  # queries of a program of the first kernel
KEYS = 32  # that both kernels read at a time
LEAST_QUERIES = 16  # the fewest that tensor cores multiply
MOST_PARTS, LEAST_PART = 16, 512  # parts of the shared keys; keys of a part
NUM_WARPS, NUM_STAGES = 4, 2
LOG2_E = tl.constexpr(1.4426950408889634)
BITS = tl.constexpr(WORD)


class TritonAttentionPlan:
    """Attention of the tokens of groups in one step; prepares once what all layers have in common.

    Args:
        shared: The tokens; N of them. `lengths` may be upper bounds.
        lengths: [N] int32 on the device, keys that each token sees; written for unseen tokens.
        tables: [rows of the batch, blocks] int32, on the device.
        heads: Query heads, and KV heads.
    """

    def __init__(
        self, shared: SharedAttentionTokens, lengths: torch.Tensor, tables: torch.Tensor, heads: tuple[int, int]
    ) -> None:
        device, (num_heads, num_kv_heads) = tables.device, heads
        self.shared, self._lengths, self._tables = shared, lengths, tables
        self._spans: dict[int, torch.Tensor] = {}  # by window: [N] int32, positions that each token sees
        per_tile = TILE // (num_heads // num_kv_heads)
        counts = np.diff(shared.starts)
        num_tiles = -(-counts // per_tile)
        of_group = np.repeat(np.arange(len(counts)), num_tiles)
        first = shared.starts[:-1][of_group] + search_spans(0, num_tiles) * per_tile
        end = np.minimum(first + per_tile, shared.starts[1:][of_group])
        tiles = np.stack([first, end, shared.num_shared[of_group]])
        of_tokens = np.stack([shared.places, shared.rows, np.repeat(shared.num_shared, counts), shared.tree_starts])
        self._trees = (
            shared.trees if isinstance(shared.trees, torch.Tensor) else uploaded_for_search(shared.trees, device)
        )
        self._has_trees = bool((shared.tree_starts < shared.lengths).any())
        self._tiles, self._tokens = (
            uploaded_for_search(array.astype(np.int32), device) for array in (tiles, of_tokens)
        )
        for tokens, of_rows, of_lengths in shared.unseen:
            self._tokens[1, tokens], self._lengths[tokens] = of_rows, of_lengths
        programs, most = len(first) * num_kv_heads, int(shared.num_shared.max())
        wanted = -(-2 * _num_attention_processors(device) // programs)
        self._num_parts = max(min(MOST_PARTS, wanted, -(-most // LEAST_PART)), 1)

    def attend(self, queries: torch.Tensor, outputs: torch.Tensor, kv_cache: torch.Tensor, scoring: Scoring) -> None:
        """Attention in one layer, causal or along trees. Other outputs of the batch stay unchanged.

        Args:
            queries: [tokens of the batch, heads, head size], the last two dimensions dense.
            outputs: As `queries`; written.
            kv_cache: [blocks, KV heads, block size, 2 * head size] of the same type, keys before values, the last
                dimension dense.
            scoring: The layer's.
        """
        scale, window, soft_cap, sinks = scoring
        if window is not None and window not in self._spans:
            self._spans[window] = self._spans_of(window)
        # The soft cap applies to scaled scores; weights are powers of 2.
        scales = (2 * scale / soft_cap, soft_cap * LOG2_E.value) if soft_cap else (scale * LOG2_E.value, 0.0)
        _, num_kv_heads, block_size, _ = kv_cache.shape
        _, num_heads, head_size = queries.shape
        assert queries.dtype == outputs.dtype == kv_cache.dtype
        assert queries.stride()[1:] == outputs.stride()[1:] == (head_size, 1)
        assert kv_cache.stride(3) == self._tables.stride(1) == 1
        count, heads = len(self.shared.places), num_heads // num_kv_heads
        sums = torch.empty(self._num_parts, count, num_heads, head_size, dtype=torch.float32, device=queries.device)
        logs = torch.empty(self._num_parts, count, num_heads, dtype=torch.float32, device=queries.device)
        cache = kv_cache, *kv_cache.stride()[:3], self._tables, self._tables.stride(0)
        of_both: dict[str, Any] = {
            "heads": heads,
            "head_size": head_size,
            "padded_size": next_power_of_2(head_size),
            "block_size": block_size,
            "keys_at_a_time": KEYS,
            "has_window": window is not None,
            "has_soft_cap": soft_cap > 0,
            "num_stages": NUM_STAGES,
        }
        counts = self._num_parts, count, num_kv_heads
        seen = self._lengths, None if window is None else self._spans[window]
        _attend_to_shared_kernel[self._tiles.shape[1], num_kv_heads, self._num_parts](
            *(queries, queries.stride(0), *cache, *self._tiles, *self._tokens[:2], *seen, sums, logs, *counts),
            *scales,
            tile=TILE,
            num_warps=warps_of_attention_tile(head_size),
            **of_both,
        )
        _attend_to_own_kernel[count, num_kv_heads](
            *(queries, queries.stride(0), outputs, outputs.stride(0), *cache, *self._tokens, *seen),
            *(self._trees, self._trees.shape[1], sums, logs, *counts, *scales, sinks),
            has_trees=self._has_trees,
            has_sinks=sinks is not None,
            padded_heads=max(next_power_of_2(heads), LEAST_QUERIES),
            num_warps=NUM_WARPS,
            **of_both,
        )

    def _spans_of(self, window: int) -> torch.Tensor:
        """[N] int32 on the device, the positions that each token sees with this window."""
        if isinstance(self.shared.trees, torch.Tensor):
            tree_starts = torch.minimum(self._tokens[3], self._lengths)
            return self._lengths - device_first_attention_keys(self.shared.trees, tree_starts, window)
        return uploaded_for_search(self.shared.lengths - first_attention_keys(self.shared, window), self._tables.device)


def warps_of_attention_tile(head_size: int) -> int:
    """Warps of a program of the first kernel: with fewer, some GPUs would spill the sums of large heads."""
    return NUM_WARPS if head_size <= 128 else 2 * NUM_WARPS


def _num_attention_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def _attend_in_kernel(
    query, first_key, top, total, sums, start, end, tree_start, tree, cache, block_stride, token_stride, table, scale,
    soft_cap, has_tree: tl.constexpr, head_size: tl.constexpr, padded_size: tl.constexpr, block_size: tl.constexpr,
    keys_at_a_time: tl.constexpr, has_window: tl.constexpr, has_soft_cap: tl.constexpr,
):  # fmt: skip
    """Continues a softmax over keys [start, end); from tree_start on, only keys with set bits are seen.

    Args:
        query: [M, padded_size].
        first_key: [M], the first key that each query sees, if there is a window.
        top: [M] float32.
        total: [M] float32.
        sums: [M, padded_size] float32.
        tree: Pointer to the token's words.
        cache: Pointer to the KV head.
        table: Pointer to the row.
    """
    column = tl.arange(0, padded_size)
    in_head = column < head_size
    for first in range(start, end, keys_at_a_time):
        key = first + tl.arange(0, keys_at_a_time)
        is_key = key < end
        block = tl.load(table + key // block_size, mask=is_key, other=0).to(tl.int64)
        at = cache + block * block_stride + (key % block_size) * token_stride
        is_there = is_key[:, None] & in_head[None, :]
        keys = tl.load(at[:, None] + column[None, :], mask=is_there, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if has_soft_cap:
            scores = soft_cap * (2.0 * tl.sigmoid(scores) - 1.0)  # tanh of half of them
        is_seen = is_key
        if has_tree:
            node = tl.maximum(key - tree_start, 0)
            word = tl.load(tree + node // BITS, mask=is_key & (key >= tree_start), other=-1)
            is_seen = is_key & (((word >> (node % BITS).to(tl.int64)) & 1) != 0)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        if has_window:
            scores = tl.where(key[None, :] >= first_key[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights, rescaled = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
        values = tl.load(at[:, None] + head_size + column[None, :], mask=is_there, other=0.0)
        sums = sums * rescaled[:, None]
        sums = tl.dot(weights.to(values.dtype), values, acc=sums, input_precision="ieee")
        total, top = total * rescaled + tl.sum(weights, axis=1), new_top
    return top, total, sums


# Triton recompiles a kernel where the alignment of an argument changes; that of packed tensors changes with the batch,
# and so do the strides of a draft model's tables.


@triton.jit(
    do_not_specialize=["table_stride", "num_parts", "count", "num_kv_heads"],
    do_not_specialize_on_alignment=["first_tokens", "end_tokens", "num_shared", "places", "rows", "lengths", "spans"],
)
def _attend_to_shared_kernel(
    queries, query_stride, cache, block_stride, head_stride, token_stride, tables, table_stride, first_tokens,
    end_tokens, num_shared, places, rows, lengths, spans, sums, logs, num_parts, count, num_kv_heads, scale, soft_cap,
    heads: tl.constexpr, head_size: tl.constexpr, padded_size: tl.constexpr, block_size: tl.constexpr,
    keys_at_a_time: tl.constexpr, has_window: tl.constexpr, has_soft_cap: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of queries over a part of what all rows of their group share.

    Args:
        queries: [tokens, heads, head_size].
        cache: [blocks, KV heads, block_size, 2 * head_size].
        tables: [rows, blocks].
        first_tokens: [tiles], among the tokens of groups.
        end_tokens: [tiles].
        num_shared: [tiles].
        places: [N], of tokens in the batch.
        rows: [N].
        lengths: [N].
        spans: [N], keys up to `lengths` that each token sees.
        sums: [parts, N, heads, head_size].
        logs: [parts, N, heads], logarithms of the sums of weights, to base 2.
    """
    kv_head, part = tl.program_id(1), tl.program_id(2)
    first, end = tl.load(first_tokens + tl.program_id(0)), tl.load(end_tokens + tl.program_id(0))
    shared = tl.load(num_shared + tl.program_id(0))
    query = tl.arange(0, tile)
    token, head = first + query // heads, kv_head * heads + query % heads
    is_query = token < end
    column = tl.arange(0, padded_size)
    is_there = is_query[:, None] & (column < head_size)[None, :]
    place = tl.load(places + token, mask=is_query, other=0).to(tl.int64)
    at = place * query_stride + head * head_size
    of_tile = tl.load(queries + at[:, None] + column[None, :], mask=is_there, other=0.0)
    top = tl.zeros([tile], tl.float32) - 1e30
    total = tl.zeros([tile], tl.float32)
    sum_of_tile = tl.zeros([tile, padded_size], tl.float32)
    table = tables + tl.load(rows + first).to(tl.int64) * table_stride
    per_part = tl.cdiv(tl.cdiv(shared, num_parts), keys_at_a_time) * keys_at_a_time
    start, end_key, first_key = part * per_part, tl.minimum((part + 1) * per_part, shared), query
    if has_window:  # keys before all windows may be NaN
        first_key = tl.load(lengths + token, mask=is_query, other=0) - tl.load(spans + token, mask=is_query, other=0)
        first_seen = tl.min(tl.where(is_query, first_key, shared), axis=0)
        start = tl.maximum(start, first_seen)
    top, total, sum_of_tile = _attend_in_kernel(
        of_tile, first_key, top, total, sum_of_tile, start, end_key, shared, tables, cache + kv_head * head_stride,
        block_stride, token_stride, table, scale, soft_cap, False, head_size, padded_size, block_size, keys_at_a_time,
        has_window, has_soft_cap,
    )  # fmt: skip
    is_empty = total == 0.0
    to = (part * count + token).to(tl.int64) * (num_kv_heads * heads) + head
    share = 1.0 / tl.where(is_empty, 1.0, total)
    tl.store(sums + to[:, None] * head_size + column[None, :], sum_of_tile * share[:, None], mask=is_there)
    tl.store(logs + to, tl.where(is_empty, -1e30, top + tl.log2(tl.where(is_empty, 1.0, total))), mask=is_query)


@triton.jit(
    do_not_specialize=["table_stride", "num_words", "num_parts", "count", "num_kv_heads"],
    do_not_specialize_on_alignment=["places", "rows", "num_shared", "tree_starts", "lengths", "spans"],
)
def _attend_to_own_kernel(
    queries, query_stride, outputs, output_stride, cache, block_stride, head_stride, token_stride, tables, table_stride,
    places, rows, num_shared, tree_starts, lengths, spans, trees, num_words, sums, logs, num_parts, count, num_kv_heads,
    scale, soft_cap, sinks, heads: tl.constexpr, head_size: tl.constexpr, padded_size: tl.constexpr,
    block_size: tl.constexpr, keys_at_a_time: tl.constexpr, has_window: tl.constexpr, has_soft_cap: tl.constexpr,
    has_trees: tl.constexpr, has_sinks: tl.constexpr, padded_heads: tl.constexpr,
):  # fmt: skip
    """Attention of a token over its own keys, continuing the sums of the first kernel.

    Args:
        queries: [tokens, heads, head_size].
        outputs: [tokens, heads, head_size].
        cache: [blocks, KV heads, block_size, 2 * head_size].
        tables: [rows, blocks].
        places: [N], of tokens in the batch.
        rows: [N].
        num_shared: [N].
        tree_starts: [N], the first key of the tree of its row; `lengths`, or more, if there is none.
        lengths: [N].
        spans: [N], keys up to `lengths` that each token sees, except those that its tree hides.
        trees: [N, num_words], what each sees of its tree.
        sums: [parts, N, heads, head_size].
        logs: [parts, N, heads].
        sinks: [heads].
    """
    token, kv_head = tl.program_id(0), tl.program_id(1)
    query = tl.arange(0, padded_heads)
    head, column = kv_head * heads + query, tl.arange(0, padded_size)
    is_query = query < heads
    is_there = is_query[:, None] & (column < head_size)[None, :]
    place = tl.load(places + token).to(tl.int64)
    at = head[:, None] * head_size + column[None, :]
    of_token = tl.load(queries + place * query_stride + at, mask=is_there, other=0.0)
    top = tl.zeros([padded_heads], tl.float32) - 1e30
    total = tl.zeros([padded_heads], tl.float32)
    if has_sinks:
        top = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    sum_of_token = tl.zeros([padded_heads, padded_size], tl.float32)
    for part in range(num_parts):
        of_part = (part * count + token).to(tl.int64) * (num_kv_heads * heads)
        log = tl.load(logs + of_part + head, mask=is_query, other=-1e30)
        new_top = tl.maximum(top, log)
        rescaled, weight = tl.exp2(top - new_top), tl.exp2(log - new_top)
        part_sum = tl.load(sums + of_part * head_size + at, mask=is_there, other=0.0)
        sum_of_token = sum_of_token * rescaled[:, None] + part_sum * weight[:, None]
        total, top = total * rescaled + weight, new_top
    start, end = tl.load(num_shared + token), tl.load(lengths + token)
    if has_window:
        start = tl.maximum(start, end - tl.load(spans + token))
    top, total, sum_of_token = _attend_in_kernel(
        of_token, query, top, total, sum_of_token, start, end, tl.load(tree_starts + token),
        trees + token.to(tl.int64) * num_words, cache + kv_head * head_stride, block_stride, token_stride,
        tables + tl.load(rows + token).to(tl.int64) * table_stride, scale, soft_cap, has_trees, head_size, padded_size,
        block_size, keys_at_a_time, False, has_soft_cap,
    )  # fmt: skip
    found = sum_of_token / total[:, None]
    tl.store(outputs + place * output_stride + at, found.to(outputs.dtype.element_ty), mask=is_there)


class AttentionLayer(NamedTuple):
    """A layer whose attention trie_beam's kernels compute."""

    scoring: Scoring
    kv_cache: torch.Tensor
    table: torch.Tensor  # [rows, blocks] int32
    heads: tuple[int, int]  # query heads, and KV heads


def warm_up_attention(layers: Iterable[AttentionLayer], has_trees: bool) -> None:
    """Runs each layer's attention for one token and, where it may compute trees, for a tree of one."""
    for layer in layers:
        for has_tree in (False, True) if has_trees else (False,):
            _attend_once_to_warm_up(layer, has_tree)


def _attend_once_to_warm_up(layer: AttentionLayer, has_tree: bool) -> None:
    none, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    tree_starts = none if has_tree else one
    shared = SharedAttentionTokens(
        none, none, one, np.array([0, 1], np.int32), none, tree_starts, np.ones((1, 1), np.int64)
    )
    num_heads, head_size = layer.heads[0], layer.kv_cache.shape[3] // 2
    queries = layer.kv_cache.new_zeros(1, num_heads, head_size)
    plan = TritonAttentionPlan(shared, uploaded_for_search(one, queries.device), layer.table, layer.heads)
    plan.attend(queries, torch.empty_like(queries), layer.kv_cache, layer.scoring)
