"""Every example of the README runs as it stands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.server import serving_by
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
OFFLINE = [example for example in EXAMPLES if "openai" not in example]
CLIENT = [example for example in EXAMPLES if "openai" in example]
(SERVE,) = re.findall(r"```bash\n(vllm serve .*?)```", README, re.DOTALL)


def run(example: str, folder: Path, **variables: str) -> list[str]:
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
    own_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(index == 0))}  # of the engine; to start it takes longer
    assert len(run(OFFLINE[index], tmp_path, **own_process)) == lines


def test_client_examples_run_against_the_server_of_the_readme(tmp_path: Path) -> None:
    with serving_by([*shlex.split(SERVE), "--enforce-eager"], tmp_path / "log", port=8000):
        for example in CLIENT:
            assert len(run(example, tmp_path)) == 6
