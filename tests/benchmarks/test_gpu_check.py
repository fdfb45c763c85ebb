"""The check for GPUs says what it needs, and compares what it says it compares."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu_kernels import Inputs, Shape, check
from tests import RUNS_V2
from tests.conftest import ROOT
from vllm_trie.worker import kernels

CPU = torch.device("cpu")
SHAPE = Shape(width=4, num_groups=2, vocab_size=500, num_layers=2)
needs_interpreter = pytest.mark.skipif(not RUNS_V2, reason="needs VLLM_USE_V2_MODEL_RUNNER=1 for Triton's interpreter")


def run(*command: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    result = run("-m", "benchmarks.gpu_check")
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("gpu_check needs a GPU with CUDA")


def test_kernels_need_no_vllm() -> None:
    result = run("-c", "import sys; sys.modules['vllm'] = None; import benchmarks.gpu_check")
    assert result.returncode == 0, result.stderr


@needs_interpreter
def test_check_passes_where_kernels_and_references_agree() -> None:
    check(Inputs(SHAPE, CPU, seed=1))


@needs_interpreter
@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [("settle", "settle otherwise"), ("permute_rows", "permute otherwise"), ("copy_tails", "permute otherwise")],
)
def test_check_fails_where_they_differ(monkeypatch: pytest.MonkeyPatch, kernel: str, complaint: str) -> None:
    inputs = Inputs(SHAPE, CPU, seed=1)
    monkeypatch.setattr(kernels, kernel, lambda *_: torch.zeros(1))
    with pytest.raises(AssertionError, match=complaint):
        check(inputs)


@needs_interpreter
def test_check_fails_where_scores_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(SHAPE, CPU, seed=1)
    right = kernels.continuation_keys
    monkeypatch.setattr(kernels, "continuation_keys", lambda *args: right(args[0] * 1.01, *args[1:]))
    with pytest.raises(AssertionError, match="scores differ"):
        check(inputs)
