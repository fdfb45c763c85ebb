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


@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [("settle", "settle otherwise"), ("permute_rows", "permute otherwise"), ("copy_tails", "permute otherwise")],
)
def test_check_fails_where_they_differ(monkeypatch: pytest.MonkeyPatch, kernel: str, complaint: str) -> None:
    inputs = Inputs(SHAPE, DEVICE, seed=1)
    monkeypatch.setattr(kernels, kernel, lambda *_: torch.zeros(1))
    with pytest.raises(AssertionError, match=complaint):
        check(inputs)


def test_check_fails_where_scores_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(SHAPE, DEVICE, seed=1)
    right = kernels.continuation_keys
    monkeypatch.setattr(kernels, "continuation_keys", lambda *args: right(args[0] * 1.01, *args[1:]))
    with pytest.raises(AssertionError, match="scores differ"):
        check(inputs)
