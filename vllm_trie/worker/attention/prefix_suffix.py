"""Attention over shared blocks by two calls of FlashAttention, whose results vLLM's `merge_attn_states` merges.

The first call reads what rows share: all rows of a group are one sequence, whose queries are theirs and see every key.
The second reads, row by row, the keys that follow. Ordinary rows share nothing: the first call finds no keys for them,
and its result does not count in the merge. So the whole batch stays together, in its own order.

A full CUDA graph contains both calls: it reads the description of a step from fixed addresses, for as many sequences of
the first call as the graph has. Unused ones have no queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from vllm_trie.search.devices import copy_into_for_search, search_arange, uploaded_for_search
from vllm_trie.worker.attention.shared_rows import Scoring, SharedRows


class Batch(Protocol):
    """vLLM's description of the rows of a batch; N tokens of R rows, in the order of its rows."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor  # [R + 1] int32, on the device
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor  # [R] int32, on the device
    seq_lens_cpu_upper_bound: torch.Tensor | None
    block_table_tensor: torch.Tensor  # [R, blocks] int32, on the device


class Calls(NamedTuple):
    """FlashAttention's functions, as in vLLM."""

    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]]  # `flash_attn_varlen_func`
    merge: Callable[..., None]  # `merge_attn_states`


class Layer(NamedTuple):
    """The inputs and outputs of one layer.

    Args:
        queries: [N, heads, head size].
        outputs: [N, heads, head size], written.
        keys, values: [blocks, block size, KV heads, head size].
        scoring: Without a window that hides anything.
        scales: For 8-bit numbers, [1] each: of queries, keys and values, by argument name.
        fa_version: The major version of FlashAttention.
    """

    queries: torch.Tensor
    outputs: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scoring: Scoring
    scales: dict[str, torch.Tensor]
    fa_version: int | None


class AttentionSequences(NamedTuple):
    """The sequences of one call: rows, or what several rows share."""

    starts: torch.Tensor  # [sequences + 1] int32, where their queries start
    most_queries: int
    lengths: torch.Tensor  # [sequences] int32, keys
    most_keys: int
    tables: torch.Tensor  # [sequences, blocks] int32

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of FlashAttention."""
        return {
            "cu_seqlens_q": self.starts,
            "max_seqlen_q": self.most_queries,
            "seqused_k": self.lengths,
            "max_seqlen_k": self.most_keys,
            "block_table": self.tables,
        }


class DescribedStep(NamedTuple):
    """Which rows of a step share what, on the device, and the bounds that the host must know ahead.

    Args:
        packed: [3 * S + 1 + R] int32. Of S sequences of the first call: the row in whose table their keys are, where
            their queries start, and the end of these, and their numbers of keys; then how many keys each of R rows
            shares.
        num_sequences: S.
        columns: [C] int64, 0, 1, ...: as many columns of the rows' tables as keys of their own may take.
        most_together: The most queries of a sequence of the first call.
        most_shared: The most keys of a sequence of the first call.
        most_own: The most keys of a row in the second call.
        most_keys: The most keys of a row.
    """

    packed: torch.Tensor
    num_sequences: int
    columns: torch.Tensor
    most_together: int
    most_shared: int
    most_own: int
    most_keys: int


# From the sequences of a call, and whether it is causal, to further arguments of FlashAttention.
Schedule = Callable[[AttentionSequences, bool], dict[str, Any]]


class PrefixSuffixGraphs:
    """What full CUDA graphs of decoding steps read of a step, in the layers of one builder, at fixed addresses.

    Args:
        sizes: Rows of each graph, one token each.
        num_sequences: Sequences of the first call in each graph.
        schedule: What FlashAttention needs ahead.
        device: The graphs' device.
    """

    def __init__(self, sizes: Sequence[int], num_sequences: int, schedule: Schedule, device: torch.device) -> None:
        self.sizes = frozenset(sizes)
        self.most_groups = (num_sequences - 1) // 2  # of adjacent rows, with others before each, and after all
        self.schedule = schedule
        self._num_sequences = num_sequences
        self._packed = torch.zeros(3 * num_sequences + 1 + max(sizes), dtype=torch.int32, device=device)
        self._columns: torch.Tensor | None = None

    def hold(self, num_rows: int, num_groups: int) -> bool:
        """Whether a graph has room for `num_rows` rows, of which `num_groups` groups share blocks."""
        return num_rows <= max(self.sizes) and num_groups <= self.most_groups

    def describe(self, rows: _SharingRows, table_width: int, block_size: int) -> DescribedStep:
        """Uploads a step to where graphs read it.

        Args:
            rows: The rows of the step, as many as a graph has.
            table_width: Blocks in the table of a row, in all steps.
            block_size: Tokens of a block.

        Raises:
            ValueError: there are more sequences than the graphs have.
        """
        missing = self._num_sequences - len(rows.firsts)
        if missing < 0:
            raise ValueError(f"{len(rows.firsts)} sequences of rows, but CUDA graphs have {self._num_sequences}")
        if self._columns is None:  # now, because nothing is captured yet
            self._columns = torch.arange(table_width, device=self._packed.device)
        packed = self._packed[: 3 * self._num_sequences + 1 + len(rows.shared)]
        copy_into_for_search(rows.packed(missing), packed)
        most_keys = table_width * block_size
        together, shared, own = len(rows.shared), most_keys, most_keys
        return DescribedStep(packed, self._num_sequences, self._columns, together, shared, own, most_keys)


class PrefixSuffixAttention:
    """Attention of a batch in one step; prepares once, in one upload, what all layers have in common.

    Args:
        groups: Rows that share blocks, and compute no trees.
        batch: All rows.
        block_size: Tokens of a block.
        num_splits: Into how many parts FlashAttention may split keys outside graphs; 0 leaves it to FlashAttention.
        graphs: Given where this is captured or replayed as part of a graph, which contains its device operations.
    """

    def __init__(
        self,
        groups: Sequence[SharedRows],
        batch: Batch,
        block_size: int,
        num_splits: int = 0,
        graphs: PrefixSuffixGraphs | None = None,
    ) -> None:
        assert batch.seq_lens_cpu_upper_bound is not None
        bounds, tables = batch.seq_lens_cpu_upper_bound.numpy(), batch.block_table_tensor
        rows = _SharingRows.of(groups, bounds, batch.query_start_loc_cpu.numpy(), block_size)
        self._batch, self._block_size = batch, block_size
        if graphs is None:
            self._step = rows.described(bounds, block_size, tables.device)
            self._schedule: Schedule = lambda *_: {"num_splits": num_splits}
        else:
            self._step, self._schedule = graphs.describe(rows, tables.shape[1], block_size), graphs.schedule

    @cached_property
    def _calls(self) -> tuple[tuple[AttentionSequences, dict[str, Any]], ...]:
        """Both calls: their sequences, and what FlashAttention needs ahead. The first layer makes them."""
        batch, step, count = self._batch, self._step, self._step.num_sequences
        tables, num_rows = batch.block_table_tensor, len(batch.seq_lens)
        firsts, starts, lengths, shared = torch.split(step.packed, [count, count + 1, count, num_rows])
        of_firsts = tables[:, : step.most_shared // self._block_size].index_select(0, firsts)
        prefix = AttentionSequences(starts, step.most_together, lengths, step.most_shared, of_firsts)
        columns = (shared // self._block_size)[:, None] + step.columns
        own = tables.gather(1, columns.clamp_(max=tables.shape[1] - 1))
        starts, lengths = batch.query_start_loc, batch.seq_lens - shared
        suffix = AttentionSequences(starts, batch.max_query_len, lengths, step.most_own, own)
        return (prefix, self._schedule(prefix, False)), (suffix, self._schedule(suffix, True))

    def computes(self, window: int | None) -> bool:
        """Whether a layer's window hides nothing in this batch, so that shared keys are one matrix product."""
        return window is None or window >= self._step.most_keys

    def attend(self, calls: Calls, layer: Layer) -> None:
        """Attention in one layer. A head's sink takes part in the softmax once: with the rows' own keys."""
        num_tokens = self._batch.num_actual_tokens
        queries, outputs = layer.queries[:num_tokens], layer.outputs[:num_tokens]
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
                **scheduled,
            )
            for is_suffix, (rows, scheduled) in zip((False, True), self._calls, strict=True)
        )
        calls.merge(outputs, prefix, prefix_log, suffix, suffix_log)


class _SharingRows(NamedTuple):
    """R rows of a step as sequences: adjacent rows of a group that shares something are one, as are ordinary ones."""

    firsts: np.ndarray  # [sequences], the first row of each
    starts: np.ndarray  # [sequences + 1], where their queries start, and the end of these
    shared: np.ndarray  # [R], keys that each row shares

    @classmethod
    def of(cls, groups: Sequence[SharedRows], bounds: np.ndarray, starts: np.ndarray, block_size: int) -> _SharingRows:
        """From groups, in a batch of rows with `bounds` [R] keys, whose queries start at `starts` [R + 1]."""
        of_row, shared = shared_attention_by_row(groups, bounds - np.diff(starts), block_size)
        firsts = np.append(True, of_row[1:] != of_row[:-1]).nonzero()[0]
        return cls(firsts, np.append(starts[firsts], starts[-1]), shared)

    def packed(self, num_empty: int = 0) -> np.ndarray:
        """`DescribedStep.packed`, with `num_empty` further sequences without queries."""
        ends = np.pad(self.starts, (0, num_empty), mode="edge")
        firsts, lengths = (np.pad(part, (0, num_empty)) for part in (self.firsts, self.shared[self.firsts]))
        return np.concatenate([firsts, ends, lengths, self.shared]).astype(np.int32)

    def described(self, bounds: np.ndarray, block_size: int, device: torch.device) -> DescribedStep:
        """A description no wider than the step."""
        most_shared, most_own = max(int(self.shared.max()), block_size), int((bounds - self.shared).max())
        columns, packed = search_arange(-(-most_own // block_size), device), uploaded_for_search(self.packed(), device)
        most_together, most_keys = int(np.diff(self.starts).max()), int(bounds.max())
        return DescribedStep(packed, len(self.firsts), columns, most_together, most_shared, most_own, most_keys)


def shared_attention_by_row(
    groups: Sequence[SharedRows], num_before: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """[R] each: the group of each row, or -1, and how many of its first tokens are in blocks that all its group shares.

    Args:
        groups: Rows of a batch.
        num_before: [R], tokens of each row before those that it computes; each of these sees a key that is not shared.
        block_size: Tokens of a block.
    """
    of_row, shared = np.full(len(num_before), -1), np.zeros(len(num_before), np.int64)
    for number, (places, num_shared, _) in enumerate(groups):
        of_row[places] = number
        shared[places] = min(num_shared, int(num_before[places].min())) // block_size * block_size
    return of_row, shared
