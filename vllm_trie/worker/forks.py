"""Let rows continue the histories of others: their tokens, their full blocks, and the content of their tail blocks.

A row that continues another is dead itself: no row is both source and destination, so the order of copies is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_trie.worker import kernels
from vllm_trie.worker.kv_blocks import KVBlocks


@dataclass(slots=True)
class Forks:
    """What rows of the batch continue, before it is carried out; groups of equal width come together."""

    slots: list[np.ndarray] = field(default_factory=list)
    first_rows: list[np.ndarray] = field(default_factory=list)  # of each row's group
    parents: list[torch.Tensor] = field(default_factory=list)
    num_common: list[np.ndarray] = field(default_factory=list)
    num_tokens: list[np.ndarray] = field(default_factory=list)
    counts_tokens: list[bool] = field(default_factory=list)

    def add(
        self,
        slots: np.ndarray,
        parents: torch.Tensor,
        num_common: Sequence[int],
        num_tokens: Sequence[int],
        counts_tokens: bool,
    ) -> None:
        """Let rows of G groups continue rows of their own group.

        Args:
            slots: [G, b], where the rows are.
            parents: [G, b] on the device, which row of its group each continues.
            num_common: [G], tokens that are the same in all histories of a group, the first ones.
            num_tokens: [G], of each history, all of them computed.
            counts_tokens: Penalties read how often a row's tokens occurred.
        """
        (num_groups, width), num_before = slots.shape, sum(map(len, self.slots))
        self.first_rows.append(np.repeat(num_before + width * np.arange(num_groups), width))
        self.slots.append(slots.ravel())
        self.parents.append(parents.flatten())
        self.num_common.append(np.repeat(num_common, width))
        self.num_tokens.append(np.repeat(num_tokens, width))
        self.counts_tokens.append(counts_tokens)

    def rows(self) -> np.ndarray:
        """[4, R] int64: each row's slot, the first row of its group, its common tokens, its tokens."""
        fields = (self.slots, self.first_rows, self.num_common, self.num_tokens)
        return np.stack([np.concatenate(of_classes) for of_classes in fields]).astype(np.int64)


@dataclass(frozen=True, slots=True)
class RowForks:
    """What R rows continue; on the device."""

    rows: torch.Tensor  # as `Forks.rows`
    parents: torch.Tensor  # [R] int, within a row's group
    num_tokens: np.ndarray  # [R], on the host too

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def slots(self) -> torch.Tensor:
        """[R] int64: each row's own."""
        return self.rows[0]

    @property
    def sources(self) -> torch.Tensor:
        """[R] int64: the slot that each row continues."""
        return self.rows[0][self.rows[1] + self.parents]


@dataclass(frozen=True, slots=True)
class Tables:
    """The block tables of all KV cache groups."""

    tables: list[torch.Tensor]  # [slots, blocks] int32 each
    block_sizes: list[int]
    pointers: torch.Tensor  # [tables] uint64, on the device like the others
    strides: torch.Tensor  # [tables] int64, from slot to slot
    sizes: torch.Tensor  # [tables] int64, the block sizes

    @classmethod
    def of(cls, tables: Sequence[torch.Tensor], block_sizes: Sequence[int]) -> Tables:
        """Describe tables to the device, once: they must stay where they are."""
        device = tables[0].device
        return cls(
            list(tables),
            list(block_sizes),
            torch.tensor([table.data_ptr() for table in tables], dtype=torch.uint64, device=device),
            torch.tensor([table.stride(0) for table in tables], dtype=torch.int64, device=device),
            torch.tensor(block_sizes, dtype=torch.int64, device=device),
        )


def permute(forks: RowForks, tokens: torch.Tensor, tables: Tables, kv_blocks: KVBlocks) -> None:
    """Let each row continue the history of its source; rows that continue themselves are left as they are.

    Args:
        forks: Of R rows.
        tokens: [slots, length] int32, of each slot.
        tables: Their blocks.
        kv_blocks: What the blocks hold.
    """
    has_tails = any((forks.num_tokens % block_size).any() for block_size in tables.block_sizes)
    if kernels.run_on(tokens.device):
        kernels.permute_rows(forks, tokens, tables)
        if has_tails:
            kernels.copy_tails(forks, tables, kv_blocks.segments)
    else:
        permute_rows(forks, tokens, tables)
        if has_tails:
            copy_tails(forks, tables, kv_blocks)


def permute_rows(forks: RowForks, tokens: torch.Tensor, tables: Tables) -> None:
    """Copy tokens beyond the common ones, and full blocks of all tables, from each row's source."""
    _, _, num_common, num_tokens = forks.rows
    _copy_columns(tokens, forks, num_common, num_tokens, int(forks.num_tokens.max()))
    for table, block_size in zip(tables.tables, tables.block_sizes, strict=True):
        most = int(forks.num_tokens.max()) // block_size
        _copy_columns(table, forks, torch.zeros_like(num_tokens), num_tokens // block_size, most)


def copy_tails(forks: RowForks, tables: Tables, kv_blocks: KVBlocks) -> None:
    """Copy the content of each source's partly filled tail block into the row's own, in all layers."""
    for table, block_size in zip(tables.tables, tables.block_sizes, strict=True):
        places = torch.from_numpy(np.flatnonzero(forks.num_tokens % block_size)).to(table.device)
        column = forks.rows[3, places] // block_size
        kv_blocks.copy_on_device(table[forks.sources[places], column], table[forks.slots[places], column])


def _copy_columns(values: torch.Tensor, forks: RowForks, start: torch.Tensor, end: torch.Tensor, most: int) -> None:
    """Copy values[source, start:end] to the same columns of each row's slot; end <= most."""
    column = torch.arange(most, device=values.device)
    is_copied = (column >= start[:, None]) & (column < end[:, None])
    values[forks.slots, :most] = torch.where(is_copied, values[forks.sources, :most], values[forks.slots, :most])
