"""Searches over tables of random logits, small enough to be searched by a loop."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch

EOS, TOKEN = 1, 7
MAX_LENGTH = 14
SEARCHES = 200
NEAR_TIE = 1e-5  # they add up in float64 and we in float32: closer scores may come in another order
TOLERANCE = 1e-4


class Found(NamedTuple):
    """One hypothesis with its prompt, and what it competes by."""

    tokens: list[int]
    score: float


class Problem:
    """A prompt, a width, and a random model in which the next token depends on the place and the last token."""

    def __init__(self, seed: int) -> None:
        choose = np.random.default_rng(seed)
        self.width = int(choose.integers(1, 7))
        self.length = int(choose.integers(1, 8))
        vocab_size = max(2, 2 * self.width + int(choose.integers(0, 20)))
        self.prompt = choose.integers(vocab_size, size=choose.integers(1, 7)).tolist()
        spread, eos_bonus = choose.uniform(0.5, 3), choose.choice([-3.0, 0.0, 2.0, 5.0])
        table = spread * choose.standard_normal((self.length, vocab_size, vocab_size), dtype=np.float32)
        table[..., EOS] += eos_bonus
        self.table = torch.from_numpy(table)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self.table[len(tokens) - len(self.prompt), tokens[-1]]


def gap(values: list[float]) -> float:
    """Between the closest two."""
    return min((after - before for before, after in itertools.pairwise(sorted(values))), default=float("inf"))
