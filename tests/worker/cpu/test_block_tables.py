"""Staged writes, block tables and slot mappings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.batches import MAX_LEN, NUM_SLOTS, Batch, batches, few
from tests.support.interpreter import Interpreter
from vllm_trie.compat.sources import installed_vllm, minor_vllm_version

pytestmark = pytest.mark.slow

BLOCK_SIZES = [4, 8]
HAS_WINDOWS = (
    minor_vllm_version(installed_vllm().version) != "0.32"
)  # vLLM 0.33 gives null blocks to what a window has left
Writes = list[tuple[int, list[list[int]]]]


def run_block_tables(
    num_groups: int, writes: Writes, idx_mapping: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, pad: int
) -> list[Any]:
    """Append blocks to slots, and what a batch sees of them."""
    from vllm.v1.worker.gpu.block_table import BlockTables

    options: dict[str, Any] = {"sliding_window_reach": [0, 6][:num_groups]} if HAS_WINDOWS else {}
    tables = BlockTables(
        BLOCK_SIZES[:num_groups], NUM_SLOTS, 64, [MAX_LEN] * num_groups, torch.device("cpu"),
        slot_mapping_enabled=[True, pad < 2][:num_groups], **options,
    )  # fmt: skip
    for slot, blocks in writes:
        tables.append_block_ids(slot, tuple(blocks[:num_groups]), overwrite=len(blocks[0]) > 2)
    tables.apply_staged_writes()
    for mapping in tables.input_block_tables:
        mapping.fill_(7)
    computed = {"num_computed_tokens": torch.arange(NUM_SLOTS, dtype=torch.int32) * 7 + 6} if HAS_WINDOWS else {}
    gathered = tables.gather_block_tables(idx_mapping, len(idx_mapping) + pad, **computed)
    counts = [*tables.num_blocks.np[:, idx_mapping.numpy()].T.tolist(), *[[MAX_LEN] * num_groups] * pad]
    seen = [[table[row, : of_row[group]] for row, of_row in enumerate(counts)] for group, table in enumerate(gathered)]
    slots = tables.compute_slot_mappings(idx_mapping, starts, positions, len(positions) + pad)
    assert all(not table._staged_write_indices for table in tables.block_tables)
    return [[table.gpu for table in tables.block_tables], seen, slots]


@pytest.mark.nightly
@few
@given(batches())
def test_rows_see_the_blocks_of_their_slots(interpreter: Interpreter, batch: Batch) -> None:
    longest, num_groups = (int(n) for n in batch.random.integers(1, [7, 3]))
    writes: Writes = [
        (slot, [batch.integers(1 + length, low=1, high=99).tolist() for length in batch.random.integers(0, longest, 2)])
        for slot in batch.random.integers(0, NUM_SLOTS, 12).tolist()
    ]
    interpreter.check(
        "tests.worker.cpu.test_block_tables:run_block_tables",
        num_groups,
        writes,
        batch.idx_mapping,
        batch.query_start_loc,
        batch.integers(batch.num_tokens, high=MAX_LEN, dtype=torch.int64),
        int(batch.random.integers(3)),
    )


def write_elements(rows: list[int], values: list[int]) -> torch.Tensor:
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

    tensor = StagedWriteTensor(NUM_SLOTS, torch.int32, torch.device("cpu"))
    for row, value in zip(rows, values, strict=True):
        tensor.stage_write_elem(row, value)
    tensor.apply_write()
    tensor.apply_write()  # there is nothing left to write
    return tensor.gpu


@few
@given(st.lists(st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(0, 99)), max_size=6))
def test_single_elements_are_written(interpreter: Interpreter, writes: list[tuple[int, int]]) -> None:
    interpreter.check(
        "tests.worker.cpu.test_block_tables:write_elements",
        list(dict(writes).keys()),
        list(dict(writes).values()),
    )
