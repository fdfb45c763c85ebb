"""Ordinary rows in a batch with beams: the same is taken of them, and put back, by kernels as in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_trie.search.devices import ALIGNMENT, uploaded_together_for_search
from vllm_trie.worker.kernels import ordinary_rows
from vllm_trie.worker.rows import sub_batch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_ROWS, NUM_LOGITS, NUM_TOKENS = 300, 500, 900
TYPES = (torch.int32,) * 4 + (torch.int64, torch.int32, torch.int64, torch.bool)


def numbers(random: np.random.Generator, count: int, most: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(random.integers(0, most, count)).to(DEVICE, dtype)


@pytest.mark.parametrize("share", [1, 100])
def test_rows_are_taken_as_in_torch(share: int) -> None:
    random, sizes = np.random.default_rng(share), (NUM_ROWS, NUM_LOGITS, NUM_TOKENS)
    rows, logits, tokens = (torch.from_numpy(random.permutation(size)[: size // share]).to(DEVICE) for size in sizes)
    moved = numbers(random, len(logits), 50, torch.int64) - 50
    lengths = np.repeat(sizes, ordinary_rows.NUM_FIELDS)
    fields = [numbers(random, n, 2 if t is torch.bool else 99, t) for n, t in zip(lengths, TYPES, strict=True)]
    before = [field.clone() for field in fields]
    by_kernel, by_torch = (
        take(rows, logits, moved, tokens, fields)
        for take in (ordinary_rows.launch_take_rows, sub_batch.take_batch_rows)
    )
    assert all(map(torch.equal, by_kernel, by_torch))
    assert all(map(torch.equal, fields, before))
    assert torch.equal(by_torch[4], fields[4][logits] + moved)


@pytest.mark.parametrize("width", [1, 3])
def test_what_was_sampled_is_put_back_as_in_torch(width: int) -> None:
    random, results = np.random.default_rng(width), []
    rows = torch.from_numpy(random.permutation(NUM_ROWS)[:290]).to(DEVICE)
    own = [numbers(random, 290 * width, 99, torch.int64).view(290, width)]
    own += [numbers(random, 290, 9, torch.int32) for _ in range(2)]
    for put in (ordinary_rows.launch_put_sampled, sub_batch.put_sampled_rows):
        counts, rejected = torch.full((2, NUM_ROWS), -1, dtype=torch.int32, device=DEVICE)
        sampled = torch.full((NUM_ROWS, 4), -1, device=DEVICE)
        put(rows, own, sampled, counts, rejected)
        results.append((sampled, counts, rejected))
    assert all(map(torch.equal, *results))
    assert (results[0][0] < 0).sum() == 4 * NUM_ROWS - 290 * width


def test_arrays_that_are_uploaded_together_are_aligned_and_keep_their_types() -> None:
    arrays = [np.arange(3, dtype=np.int32), np.arange(12).reshape(3, 4), np.zeros(0, np.int64), np.ones(5, bool)]
    uploaded = uploaded_together_for_search(arrays, DEVICE)
    for array, there in zip(arrays, uploaded, strict=True):
        np.testing.assert_array_equal(there.cpu().numpy(), array, strict=True)
        assert there.storage_offset() * there.element_size() % ALIGNMENT == 0
