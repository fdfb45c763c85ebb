"""What a worker holds of beam groups."""

from __future__ import annotations

from typing import Any

from tests import RUNS_V2

Row = tuple[list[int], list[list[int]]]  # generated tokens, and KV blocks by KV cache group


def rows_of(runner: Any) -> dict[str, list[Row]]:
    """The rows of each group that has all of them in a model runner."""
    if RUNS_V2:
        groups, known, row = runner.beam_slots.groups, runner.req_states.req_id_to_index, _slot
    else:
        groups, known, row = runner.beam_rows.groups, runner.requests, _row
    return {
        group_id: [row(runner, row_id) for row_id in rows.row_ids]
        for group_id, rows in groups.items()
        if known.keys() >= {*rows.row_ids}
    }


def _row(runner: Any, row_id: str) -> Row:
    batch, state = runner.input_batch, runner.requests[row_id]
    at = batch.req_id_to_index.get(row_id)
    if at is None:
        return state.output_token_ids, list(state.block_ids)
    tokens = batch.token_ids_cpu[at, state.num_prompt_tokens : batch.num_tokens_no_spec[at]].tolist()
    tables = batch.block_table.block_tables
    return tokens, [table.block_table.np[at, : table.num_blocks_per_row[at]].tolist() for table in tables]


def _slot(runner: Any, row_id: str) -> Row:
    states, tables = runner.req_states, runner.block_tables
    slot = states.req_id_to_index[row_id]
    tokens = states.all_token_ids.gpu[slot, states.prompt_len.np[slot] : states.total_len.gpu[slot]].tolist()
    counts = tables.num_blocks.np[:, slot].tolist()
    return tokens, [table.gpu[slot, :count].tolist() for table, count in zip(tables.block_tables, counts, strict=True)]
