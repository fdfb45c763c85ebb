"""Let rows continue the histories of others: their tokens, their full blocks, and the content of their tail blocks.

A row that continues another is dead itself: no row is both source and destination, so the order of copies is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.search.devices import search_numbers, uploaded_for_search
from vllm_trie.worker import launches
from vllm_trie.worker.kv.kv_blocks import KVBlocks
from vllm_trie.worker.kv.kv_slots import KVSlots

LARGE_BLOCK = 128  # tokens: from here on a part of a block is copied faster than all of it


def kv_rows_of_groups(slots: Sequence[np.ndarray], num_common: Sequence[Sequence[int]]) -> np.ndarray:
    """[3, R] int64 what is known of rows before they are to continue others: see `MovingRows`, the last count apart.

    The second is the first row of their group among the R.

    Args:
        slots: [G, b] of the rows of equally wide groups; such groups come together.
        num_common: [G] each, tokens that are the same in all histories of a group, the first ones.
    """
    rows, first = [np.empty((3, 0), np.int64)], 0
    for of_groups, of_prompts in zip(slots, num_common, strict=True):
        width, count = of_groups.shape[1], of_groups.size
        firsts = np.arange(first, first + count, width)
        rows.append(np.stack([of_groups.ravel(), firsts.repeat(width), np.repeat(of_prompts, width)]))
        first += count
    return np.concatenate(rows, axis=1)


class KVReorder(NamedTuple):
    """What R rows continue; on the device."""

    rows: (
        torch.Tensor
    )  # [4, R] int64: slots, the first row of their group among the R, and two counts: see `MovingRows`
    parents: torch.Tensor  # [R] integers, which row of its group each continues
    num_tokens_on_host: np.ndarray  # [R], the last of the counts

    @classmethod
    def of(
        cls, rows: np.ndarray, num_tokens: np.ndarray, parents: Sequence[torch.Tensor], device: torch.device
    ) -> KVReorder:
        """Let rows continue rows of their own group.

        Args:
            rows: [3, R], see `kv_rows_of_groups`.
            num_tokens: [R], of each history, all of them computed.
            parents: [G, b] each, on the device, which row of its group each continues.
            device: That.
        """
        of_rows = torch.cat([chosen.flatten() for chosen in parents]) if len(parents) > 1 else parents[0].flatten()
        return cls(uploaded_for_search(np.vstack([rows, num_tokens]), device), of_rows, num_tokens)

    @property
    def sources(self) -> torch.Tensor:
        """[R] int64, the slots that they continue."""
        slots, firsts, *_ = self.rows
        return slots[firsts + self.parents]

    def moving(self) -> MovingRows:
        """The rows alone that continue another one: for where it costs nothing to look at the device."""
        slots, firsts, *counts = self.rows.cpu().numpy()
        rows = np.stack([slots, slots[firsts + self.parents.cpu().numpy()], *counts])
        rows = rows[:, rows[0] != rows[1]]
        return MovingRows(torch.from_numpy(rows).to(self.rows.device), rows[3])


class MovingRows(NamedTuple):
    """Rows that continue others; on the device."""

    # [4, R] int64: slots, those that they continue, tokens that their group has in common, and tokens of histories
    rows: torch.Tensor
    num_tokens_on_host: np.ndarray  # [R], the last of these


class Tables:
    """The block tables of all KV cache groups, described to the device once: they must stay where they are.

    Args:
        tables: [slots, blocks] int32 each.
        block_sizes: Theirs.
        numbers: Of their KV cache groups; by default they are those of all.
    """

    def __init__(
        self, tables: Sequence[torch.Tensor], block_sizes: Sequence[int], numbers: Sequence[int] | None = None
    ) -> None:
        self.tables, self.block_sizes = tables, block_sizes
        self.numbers = range(len(tables)) if numbers is None else numbers
        device = tables[0].device
        pointers = uploaded_for_search(np.array([table.data_ptr() for table in tables], np.uint64), device)
        strides = uploaded_for_search(np.array([table.stride(0) for table in tables]), device)
        sizes = uploaded_for_search(np.array(block_sizes), device)
        self.on_device = pointers, strides, sizes  # [tables] each, what a kernel must know of them


def reorder_kv_rows(
    rows: KVReorder, tokens: torch.Tensor, tables: Tables, kv_blocks: KVBlocks, kv_slots: KVSlots | None
) -> None:
    """Let each row continue the history of its source; rows that continue themselves are left as they are.

    Args:
        rows: Of which some continue others.
        tokens: [slots, length] int32, of each slot.
        tables: Their blocks.
        kv_blocks: What the blocks hold.
        kv_slots: The same, token by token, where parts of blocks are to be copied.
    """
    if launches.worker_runs_kernels_on(tokens.device):
        launches.worker_module_for_gpus("kv.copies").launch_kv_reorder(rows, tokens, tables, kv_blocks.segments)
    elif len((moving := rows.moving()).num_tokens_on_host):
        copy_kv_histories(moving, tokens, tables)
        copy_kv_tails(moving, tables, kv_blocks, kv_slots)


def copy_kv_histories(rows: MovingRows, tokens: torch.Tensor, tables: Tables) -> None:
    """Copy tokens, and full blocks of all tables, from each row's source.

    What tokens lie beyond a history, nobody reads; on the earlier stages of a pipeline, where vLLM may have written the
    next ones by now, nobody reads generated tokens at all.
    """
    slots, sources, num_common, num_tokens = rows.rows
    least, most = int(rows.num_tokens_on_host.min()), int(rows.num_tokens_on_host.max())
    history = tokens[:, int(num_common.min()) : most]
    history.index_copy_(0, slots, history.index_select(0, sources))
    for table, block_size in zip(tables.tables, tables.block_sizes, strict=True):
        full = table[:, : most // block_size]
        blocks = full.index_select(0, sources)
        if least // block_size < most // block_size:  # some have fewer full blocks
            is_full = search_numbers(full.shape[1], table.device) < (num_tokens // block_size)[:, None]
            blocks = torch.where(is_full, blocks, full.index_select(0, slots))
        full.index_copy_(0, slots, blocks)


def copy_kv_tails(rows: MovingRows, tables: Tables, kv_blocks: KVBlocks, kv_slots: KVSlots | None = None) -> None:
    """Copy the content of each source's partly filled tail block into the row's own, in all layers.

    Of large blocks, as hosts and models with recurrent states have them, only what rows of a group do not have in
    common.
    """
    for table, block_size, number in zip(tables.tables, tables.block_sizes, tables.numbers, strict=True):
        (places,) = (rows.num_tokens_on_host % block_size).nonzero()
        if len(places) == 0:
            continue
        slots, sources, num_common, num_tokens = rows.rows[:, torch.from_numpy(places).to(table.device)]
        columns = num_tokens // block_size
        read, written = table[sources, columns], table[slots, columns]
        if kv_slots is not None and block_size >= LARGE_BLOCK and kv_slots.knows(number):
            parts = torch.stack([num_common, num_tokens]) - columns * block_size
            kv_slots.copy_parts(number, read, written, parts.clamp(min=0))
        else:
            kv_blocks.copy_to_others(read, written)
