"""Attention over shared blocks by two calls of FlashAttention, whose results vLLM's `merge_attn_states` merges.

The first call reads what rows share: there all rows of a group are one row, whose queries are theirs and see every key.
The second one reads, row by row, what comes after it. Ordinary rows share nothing: the first call finds no keys for
them, and writes what counts for nothing in the merge. So the whole batch is one, in its own order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from vllm_trie.search.devices import search_numbers, uploaded_for_search
from vllm_trie.worker.attention.shared_rows import Scoring, SharedRows


class Batch(Protocol):
    """What vLLM says of the rows of a batch; N tokens of R rows, in the order of its rows."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor  # [R + 1] int32, on the device
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor  # [R] int32, on the device
    seq_lens_cpu_upper_bound: torch.Tensor | None
    block_table_tensor: torch.Tensor  # [R, blocks] int32, on the device


class Calls(NamedTuple):
    """Of FlashAttention, as vLLM has them."""

    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]]  # `flash_attn_varlen_func`
    merge: Callable[..., None]  # `merge_attn_states`


class Layer(NamedTuple):
    """One layer's part.

    Args:
        queries: [N, heads, head size].
        outputs: The same, written.
        keys, values: [blocks, block size, KV heads, head size].
        scoring: Without a window that hides anything.
        scales: Of numbers of 8 bits, [1] each: of queries, keys and values, by the name of the argument.
        fa_version: The major version of FlashAttention.
    """

    queries: torch.Tensor
    outputs: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scoring: Scoring
    scales: dict[str, torch.Tensor]
    fa_version: int | None


class _AttentionRows(NamedTuple):
    """The rows of one call."""

    starts: torch.Tensor  # [rows + 1] int32, of their queries
    most_queries: int
    lengths: torch.Tensor  # [rows] int32, keys
    most_keys: int
    tables: torch.Tensor  # [rows, blocks] int32

    @property
    def options(self) -> dict[str, Any]:
        """As FlashAttention takes them."""
        return {
            "cu_seqlens_q": self.starts,
            "max_seqlen_q": self.most_queries,
            "seqused_k": self.lengths,
            "max_seqlen_k": self.most_keys,
            "block_table": self.tables,
        }


class PrefixSuffixAttention:
    """Attention of a batch in one step; whatever is the same in all layers is prepared once, in one upload.

    Args:
        groups: Of rows that share blocks, and compute no trees.
        batch: All rows.
        block_size: Theirs.
    """

    def __init__(self, groups: Sequence[SharedRows], batch: Batch, block_size: int) -> None:
        assert batch.seq_lens_cpu_upper_bound is not None
        bounds, query_starts = batch.seq_lens_cpu_upper_bound.numpy(), batch.query_start_loc_cpu.numpy()
        tables = batch.block_table_tensor
        of_row, shared = shared_attention_by_row(groups, bounds - np.diff(query_starts), block_size)
        first_rows = np.append(True, of_row[1:] != of_row[:-1]).nonzero()[0]
        starts = np.append(query_starts[first_rows], query_starts[-1])
        lengths = shared[first_rows]
        parts = shared, starts, lengths, first_rows
        packed = uploaded_for_search(np.concatenate(parts).astype(np.int32), tables.device)
        on_device, prefix_starts, prefix_lengths, at = torch.split(packed, [*map(len, parts)])
        most_shared = max(int(lengths.max()), block_size)
        self._num_tokens, self.most_keys = batch.num_actual_tokens, int(bounds.max())
        self._prefix = _AttentionRows(
            prefix_starts,
            int(np.diff(starts).max()),
            prefix_lengths,
            most_shared,
            tables[:, : most_shared // block_size].index_select(0, at),
        )
        most_own = int((bounds - shared).max())
        columns = (on_device // block_size)[:, None] + search_numbers(-(-most_own // block_size), tables.device)
        own = tables.gather(1, columns.clamp_(max=tables.shape[1] - 1))
        self._suffix = _AttentionRows(
            batch.query_start_loc, batch.max_query_len, batch.seq_lens - on_device, most_own, own
        )

    def computes(self, window: int | None) -> bool:
        """Whether a layer's window hides nothing in this batch: what all see alike is one matrix product."""
        return window is None or window >= self.most_keys

    def attend(self, calls: Calls, layer: Layer) -> None:
        """Attention in one layer. A head's sink takes part in the softmax once: with the rows' own keys."""
        queries, outputs = layer.queries[: self._num_tokens], layer.outputs[: self._num_tokens]
        (prefix, prefix_log), (suffix, suffix_log) = (
            calls.attend(
                q=queries,
                k=layer.keys,
                v=layer.values,
                softmax_scale=layer.scoring.scale,
                causal=is_suffix,
                softcap=layer.scoring.soft_cap,
                s_aux=layer.scoring.sinks if is_suffix else None,
                return_softmax_lse=True,
                fa_version=layer.fa_version,
                **{name: scale.expand(len(rows.lengths), layer.keys.shape[2]) for name, scale in layer.scales.items()},
                **rows.options,
            )
            for is_suffix, rows in ((False, self._prefix), (True, self._suffix))
        )
        calls.merge(outputs, prefix, prefix_log, suffix, suffix_log)


def shared_attention_by_row(
    groups: Sequence[SharedRows], num_before: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """[R] each: which group a row is of, or -1, and how many of its first tokens lie in blocks of all of that group.

    Args:
        groups: Of rows of a batch.
        num_before: [R], tokens of each row before those that it computes: each of these sees a key that is not shared.
        block_size: Theirs.
    """
    of_row, shared = np.full(len(num_before), -1), np.zeros(len(num_before), np.int64)
    for number, (places, num_shared, _) in enumerate(groups):
        of_row[places] = number
        shared[places] = min(num_shared, int(num_before[places].min())) // block_size * block_size
    return of_row, shared
