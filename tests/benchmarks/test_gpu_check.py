"""The check for GPUs says what it needs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.engine import ROOT

pytestmark = pytest.mark.slow


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
