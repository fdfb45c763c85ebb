"""Random batches: rows in slots, with prompts in progress, drafts, and logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

NUM_SLOTS, MAX_LEN, VOCAB_SIZE = 6, 48, 1100  # more than one block of the vocabulary
few = settings(max_examples=10)


@dataclass
class Batch:
    """Some rows [R] with their tokens [T] and rows of logits [N]."""

    random: np.random.Generator
    idx_mapping: torch.Tensor  # [R] int64
    lengths: np.ndarray  # [R] tokens of this step
    num_drafts: np.ndarray  # [R] those of them that are drafts
    max_drafts: int

    @property
    def query_start_loc(self) -> torch.Tensor:
        return _cumulative(self.lengths)

    @property
    def cu_num_logits(self) -> torch.Tensor:
        return _cumulative(self.num_drafts + 1)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_logits(self) -> int:
        return len(self.idx_mapping) + int(self.num_drafts.sum())

    @property
    def expanded_idx_mapping(self) -> torch.Tensor:
        return torch.repeat_interleave(self.idx_mapping, torch.from_numpy(self.num_drafts + 1))

    @property
    def expanded_local_pos(self) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.arange(n + 1) for n in self.num_drafts])).int()

    def integers(self, *shape: int, low: int = 0, high: int = VOCAB_SIZE, dtype: Any = torch.int32) -> torch.Tensor:
        return torch.from_numpy(self.random.integers(low, high, shape)).to(dtype)

    def flag(self) -> bool:
        return bool(self.random.integers(2))

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.random.random(shape, np.float32))

    def logits(self, num_rows: int | None = None) -> torch.Tensor:
        num_rows = self.num_logits if num_rows is None else num_rows
        return torch.from_numpy(self.random.normal(0, 3, (num_rows, VOCAB_SIZE)).astype(np.float32))


def batches(max_drafts: int | None = None) -> st.SearchStrategy[Batch]:
    """Batches of one row at least; if max_drafts is not given, half of them have drafts."""
    return st.integers(0, 2**32 - 1).map(lambda seed: _batch(np.random.default_rng(seed), max_drafts))


def _batch(random: np.random.Generator, max_drafts: int | None) -> Batch:
    num_rows = random.integers(1, 5)
    if max_drafts is None:
        max_drafts = int(random.choice([0, 2]))
    num_drafts = random.integers(0, max_drafts + 1, num_rows)
    is_decoding = random.integers(2)
    lengths = num_drafts + (1 if is_decoding else random.integers(1, 6, num_rows))
    return Batch(random, torch.from_numpy(random.permutation(NUM_SLOTS)[:num_rows]), lengths, num_drafts, max_drafts)


def _cumulative(counts: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])).int()
