"""Rows whose logits processors change: kernels read and take over what torch does."""

from __future__ import annotations

import pytest
import torch

from tests.worker.kv.test_kv_moves import NUM_SLOTS, seeded, some_fork
from vllm_trie.worker.kernels import controls

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("vocab_size", [9, controls.COUNTS_TILE + 7])
def test_rows_take_over_how_often_tokens_have_come_as_in_torch(vocab_size: int) -> None:
    for seed in range(3):
        rows = some_fork((9,) * 5, seed)
        slots = torch.randint(9, (NUM_SLOTS, vocab_size), generator=seeded(seed), dtype=torch.int32).to(DEVICE)
        by_kernel, by_torch = slots.clone(), slots.clone()
        controls.launch_reorder_counts(rows, by_kernel)
        by_torch[rows.rows[0]] = by_torch[rows.sources]
        assert not torch.equal(by_kernel, slots)
        assert torch.equal(by_kernel, by_torch)


@pytest.mark.parametrize("count", [1, 2 * controls.TILE + 3])
def test_newest_tokens_are_read_as_in_torch(count: int) -> None:
    num_logits, num_tokens = 2 * count, 3 * count
    at = torch.randperm(num_logits, generator=seeded(1))[:count].to(DEVICE)
    logits_indices = torch.randperm(num_tokens, generator=seeded(2))[:num_logits].to(DEVICE)
    positions = torch.randint(1 << 40, (num_tokens,), generator=seeded(3)).to(DEVICE)
    input_ids = torch.randint(1 << 20, (num_tokens,), generator=seeded(4), dtype=torch.int32).to(DEVICE)
    found = controls.launch_take_newest(at, logits_indices, positions, input_ids)
    for own, field in zip(found, (positions, input_ids), strict=True):
        assert own.dtype == field.dtype
        assert torch.equal(own, field[logits_indices[at]])
