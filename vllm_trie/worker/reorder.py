"""Let rows continue the histories of others: their tokens, their full blocks, and the content of their tail blocks.

A row that continues another is dead itself: no row is both source and destination, so the order of copies is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.worker import kernels
from vllm_trie.worker.kv_blocks import KVBlocks


@dataclass(slots=True)
class Reorders:
    """What rows of the batch continue, before it is carried out; groups of equal width come together."""

    slots: list[np.ndarray] = field(default_factory=list)
    first_rows: list[np.ndarray] = field(default_factory=list)  # of each row's group
    parents: list[torch.Tensor] = field(default_factory=list)
    num_common: list[np.ndarray] = field(default_factory=list)
    num_tokens: list[np.ndarray] = field(default_factory=list)

    def add(
        self,
        slots: np.ndarray,
        parents: torch.Tensor,
        num_common: Sequence[int],
        num_tokens: Sequence[int] | np.ndarray,
    ) -> None:
        """Let rows of G groups continue rows of their own group.

        Args:
            slots: [G, b], where the rows are.
            parents: [G, b] on the device, which row of its group each continues.
            num_common: [G], tokens that are the same in all histories of a group, the first ones.
            num_tokens: [G], of each history, all of them computed.
        """
        (num_groups, width), num_before = slots.shape, sum(map(len, self.slots))
        self.first_rows.append(np.repeat(num_before + width * np.arange(num_groups), width))
        self.slots.append(slots.ravel())
        self.parents.append(parents.flatten())
        self.num_common.append(np.repeat(num_common, width))
        self.num_tokens.append(np.repeat(num_tokens, width))

    def on(self, device: torch.device) -> RowReorder:
        """All of it, on the device."""
        fields = (self.slots, self.first_rows, self.num_common, self.num_tokens)
        on_host = np.stack([np.concatenate(of_classes) for of_classes in fields]).astype(np.int64)
        rows = torch.from_numpy(on_host)
        rows = rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows
        rows[1] = rows[0][rows[1] + torch.cat(self.parents)]  # from a place among the rows to the slot there
        return RowReorder(rows, on_host[3])


class RowReorder(NamedTuple):
    """What R rows continue; on the device."""

    rows: torch.Tensor  # [4, R] int64: its fields are the properties below
    num_tokens_on_host: np.ndarray  # [R]

    @property
    def slots(self) -> torch.Tensor:
        """[R], each row's own."""
        return self.rows[0]

    @property
    def sources(self) -> torch.Tensor:
        """[R], the slot that each row continues."""
        return self.rows[1]

    @property
    def num_common(self) -> torch.Tensor:
        """[R], tokens that all histories of the row's group have in common."""
        return self.rows[2]

    @property
    def num_tokens(self) -> torch.Tensor:
        """[R], of each history."""
        return self.rows[3]

    def moving(self) -> RowReorder:
        """The rows alone that continue another one: for where it costs nothing to look at the device."""
        moved = (self.slots != self.sources).nonzero()[:, 0]
        return RowReorder(self.rows[:, moved], self.num_tokens_on_host[moved.numpy()])


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


def reorder_rows(rows: RowReorder, tokens: torch.Tensor, tables: Tables, kv_blocks: KVBlocks) -> None:
    """Let each row continue the history of its source; rows that continue themselves are left as they are.

    Args:
        rows: Of which some continue others.
        tokens: [slots, length] int32, of each slot.
        tables: Their blocks.
        kv_blocks: What the blocks hold.
    """
    by_kernels = kernels.run_on(tokens.device)
    if not by_kernels and not len((rows := rows.moving()).slots):
        return
    has_tails = any((rows.num_tokens_on_host % block_size).any() for block_size in tables.block_sizes)
    if by_kernels:
        kernels.copy_histories(rows, tokens, tables)
        if has_tails:
            kernels.copy_tails(rows, tables, kv_blocks.segments)
    else:
        copy_histories(rows, tokens, tables)
        if has_tails:
            copy_tails(rows, tables, kv_blocks)


def copy_histories(rows: RowReorder, tokens: torch.Tensor, tables: Tables) -> None:
    """Copy tokens, and full blocks of all tables, from each row's source.

    What tokens lie beyond a history, nobody reads.
    """
    most = int(rows.num_tokens_on_host.max())
    tokens[rows.slots, :most] = tokens[rows.sources, :most]
    for table, block_size in zip(tables.tables, tables.block_sizes, strict=True):
        columns = most // block_size
        is_full = torch.arange(columns, device=table.device) < (rows.num_tokens // block_size)[:, None]
        table[rows.slots, :columns] = torch.where(is_full, table[rows.sources, :columns], table[rows.slots, :columns])


def copy_tails(rows: RowReorder, tables: Tables, kv_blocks: KVBlocks) -> None:
    """Copy the content of each source's partly filled tail block into the row's own, in all layers."""
    for table, block_size in zip(tables.tables, tables.block_sizes, strict=True):
        places = torch.from_numpy(np.flatnonzero(rows.num_tokens_on_host % block_size)).to(table.device)
        column = rows.num_tokens[places] // block_size
        kv_blocks.copy_on_device(table[rows.sources[places], column], table[rows.slots[places], column])
