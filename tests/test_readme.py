"""Every example of the README runs as it stands; those of the server in entrypoints/test_server.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
OFFLINE = [example for example in EXAMPLES if "openai" not in example]
CLIENT = [example for example in EXAMPLES if "openai" in example]
(SERVE,) = re.findall(r"```bash\n(vllm serve .*?)```", README, re.DOTALL)


def run_example(example: str, folder: Path, **variables: str) -> list[str]:
    """The lines of its output that begin with a score."""
    script = folder / "example.py"
    script.write_text(example)
    environment = os.environ | variables
    result = subprocess.run([sys.executable, script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return [line for line in result.stdout.splitlines() if re.match(r"\s*-\d+\.\d+ ", line)]


def test_there_are_examples_of_both_kinds() -> None:
    assert len(OFFLINE) == 3
    assert len(CLIENT) == 1


@pytest.mark.parametrize(("index", "lines"), [(0, 6), (1, 6), (2, 4)])
def test_offline_example_runs_as_pasted(index: int, lines: int, tmp_path: Path) -> None:
    """The first as its user runs it; the others without a process of the engine's own, and nothing compiled."""
    starts_sooner = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} if index == 0 else starts_sooner
    assert len(run_example(OFFLINE[index], tmp_path, **variables)) == lines
