"""What the runner tells vLLM's kernels of each row is where they expect it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.weightless import WeightlessStep, kernels_noted
from tests.support.steps import rules_of

ALIGNMENT = 16  # bytes; of another alignment, Triton compiles a kernel anew, while it serves


@pytest.mark.parametrize("num_ordinary", [0, 1])
@pytest.mark.parametrize("width", range(2, 10))
def test_counts_of_rows_are_aligned_however_many_rows_there_are(width: int, num_ordinary: int) -> None:
    with kernels_noted():
        sampled = WeightlessStep(rules_of(width), 1, vocab_size=300, num_ordinary=num_ordinary).sample(np.array([25]))
    for counts in (sampled.num_sampled, sampled.num_rejected):
        assert counts.shape == (num_ordinary + width,)
        assert counts.storage_offset() * counts.itemsize % ALIGNMENT == 0
