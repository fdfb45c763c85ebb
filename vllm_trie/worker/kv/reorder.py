"""Let rows continue the histories of others: their tokens, their full blocks, and the content of their tail blocks.

A row that continues another is dead itself: no row is both source and destination, so the order of copies is free.
"""

from __future__ import annotations

import torch

from vllm_trie.search.devices import numbers
from vllm_trie.worker import launches
from vllm_trie.worker.kv.kv_blocks import KVBlocks
from vllm_trie.worker.kv.kv_slots import KVSlots
from vllm_trie.worker.kv.row_reorder import MovingRows, RowReorder, Tables

LARGE_BLOCK = 128  # tokens: from here on a part of a block is copied faster than all of it


def reorder_rows(
    rows: RowReorder, tokens: torch.Tensor, tables: Tables, kv_blocks: KVBlocks, kv_slots: KVSlots | None
) -> None:
    """Let each row continue the history of its source; rows that continue themselves are left as they are.

    Args:
        rows: Of which some continue others.
        tokens: [slots, length] int32, of each slot.
        tables: Their blocks.
        kv_blocks: What the blocks hold.
        kv_slots: The same, token by token, where parts of blocks are to be copied.
    """
    if launches.run_on(tokens.device):
        launches.for_gpus("kv.copies").reorder_rows(rows, tokens, tables, kv_blocks.segments)
    elif len((moving := rows.moving()).num_tokens_on_host):
        copy_histories(moving, tokens, tables)
        copy_tails(moving, tables, kv_blocks, kv_slots)


def copy_histories(rows: MovingRows, tokens: torch.Tensor, tables: Tables) -> None:
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
            is_full = numbers(full.shape[1], table.device) < (num_tokens // block_size)[:, None]
            blocks = torch.where(is_full, blocks, full.index_select(0, slots))
        full.index_copy_(0, slots, blocks)


def copy_tails(rows: MovingRows, tables: Tables, kv_blocks: KVBlocks, kv_slots: KVSlots | None = None) -> None:
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
