"""Searches decide and answer what is recorded of them: see docs/developing.md on when to record anew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden.decisions import Record, differences
from tests.golden.record import DATA, ENVIRONMENT
from tests.support.engine import ROOT

pytestmark = pytest.mark.slow

NAMES = sorted(path.stem for path in DATA.glob("*.npz"))
MOST_SHOWN = 8


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the code decides as it is."""
    folder = tmp_path_factory.mktemp("replayed")
    command = [sys.executable, "-m", "tests.golden.record", "--again", "--folder", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_all_that_is_recorded_is_done_again(replayed: Path) -> None:
    assert sorted(path.stem for path in replayed.iterdir()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_decisions_are_those_that_are_recorded(replayed: Path, name: str) -> None:
    found = [*differences(Record.load(DATA / f"{name}.npz"), Record.load(replayed / f"{name}.npz"))]
    assert not found, "\n".join([f"{len(found)} differ, the first ones:", *found[:MOST_SHOWN]])
