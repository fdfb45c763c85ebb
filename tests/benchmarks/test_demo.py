"""`make demo` runs to the end and shows what it promises."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT


def test_demo_shows_hypotheses_blocks_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    command = [sys.executable, "-m", "benchmarks.demo", "--prompts", "1", "--repeats", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    for promised in (
        "Hypotheses, best first",
        "KV blocks at the peak",
        "own loop",
        "plain sampling",
        "steps per forward",
    ):
        assert promised in result.stdout
