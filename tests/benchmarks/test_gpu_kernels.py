"""What compares kernels with their references on a GPU passes where they agree, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu_attention
from benchmarks.gpu_kernels import Inputs, Shape, check
from vllm_trie.worker.kernels import slots
from vllm_trie.worker.kv import copies

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = Shape(width=4, num_groups=2, vocab_size=500, num_layers=2)


def test_check_passes_where_kernels_and_references_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, compared = Inputs(SHAPE, DEVICE, seed=1), []
    for name in ("select_by_kernel", "select_by_torch", "reorder_by_kernel", "reorder_by_torch"):
        run = getattr(inputs, name)
        monkeypatch.setattr(inputs, name, lambda run=run, name=name: (compared.append(name), run())[1])
    check(inputs)
    assert compared == ["select_by_kernel", "select_by_torch", "reorder_by_kernel", "reorder_by_torch"]


def test_check_fails_where_rows_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(SHAPE, DEVICE, seed=1)
    monkeypatch.setattr(copies, "launch_kv_fork", lambda *_: None)
    with pytest.raises(AssertionError, match="reordered"):
        check(inputs)


def test_check_fails_where_beams_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(SHAPE, DEVICE, seed=1)
    monkeypatch.setattr(slots, "launch_select_next", lambda candidates, *_: candidates)
    with pytest.raises(AssertionError, match="selected"):
        check(inputs)


@pytest.mark.parametrize("num_nodes", [1, 7])
def test_check_of_attention_passes_where_kernels_and_torch_agree_and_fails_where_they_differ(
    monkeypatch: pytest.MonkeyPatch, num_nodes: int
) -> None:
    shape = gpu_attention.Shape(5, 64, num_kv_heads=1, head_size=32, num_nodes=num_nodes)
    inputs = gpu_attention.Inputs(shape, DEVICE, torch.float32)
    gpu_attention.check(inputs, tolerance=1e-5)
    monkeypatch.setattr(inputs, "once", inputs.row_by_row)
    gpu_attention.check(inputs, tolerance=1e-5)
    lengths = inputs.row_by_row._lengths
    lengths -= 1  # of which the reference knows nothing
    with pytest.raises(AssertionError, match="differs from torch"):
        gpu_attention.check(inputs, tolerance=1e-5)
