"""Every Python example of the README runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_there_is_an_example() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_example_runs_as_pasted(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[index])
    result = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    scores = [float(line.split()[0]) for line in result.stdout.splitlines() if re.match(r"\s*-\d+\.\d+ ", line)]
    assert len(scores) == 6
