"""What compares kernels with their references on a GPU passes where they agree, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_kernels import Inputs, Shape, check
from vllm_trie.worker import kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = Shape(width=4, num_groups=2, vocab_size=500, num_layers=2)


def test_check_passes_where_kernels_and_references_agree() -> None:
    check(Inputs(SHAPE, DEVICE, seed=1))


@pytest.mark.parametrize("kernel", ["copy_histories", "copy_tails"])
def test_check_fails_where_rows_differ(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    inputs = Inputs(SHAPE, DEVICE, seed=1)
    monkeypatch.setattr(kernels, kernel, lambda *_: None)
    with pytest.raises(AssertionError, match="reordered"):
        check(inputs)


def test_check_fails_where_beams_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(SHAPE, DEVICE, seed=1)
    monkeypatch.setattr(kernels, "select_next", lambda candidates, *_: candidates)
    with pytest.raises(AssertionError, match="selected"):
        check(inputs)
