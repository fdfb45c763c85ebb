"""Searches decide and answer what is recorded of them: see docs/developing.md on when to record anew."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.golden.batches import BATCHES
from tests.golden.decisions import Record, differences
from tests.golden.record import DATA, ENVIRONMENT
from tests.support.engine import ROOT
from tests.support.sweep import sweep

pytestmark = pytest.mark.slow

NAMES = sorted(path.stem for path in DATA.glob("*.npz"))
AT_NIGHT = ("drafts", "long", "ngrams", "ranking", "ties")
MOST_SHOWN = 8


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with what the code decides as it is, in a batch and in all others that are tested with it."""

    @cache
    def replay(*names: str) -> Path:
        folder = tmp_path_factory.mktemp("replayed")
        command = [sys.executable, "-m", "tests.golden.record", "--again", "--folder", str(folder), *names]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        assert sorted(path.stem for path in folder.iterdir()) == [*names]
        return folder

    by_day = [name for name in NAMES if name not in AT_NIGHT]
    return lambda name: replay(*(AT_NIGHT if name in AT_NIGHT else by_day))


def test_all_batches_are_recorded() -> None:
    assert sorted(BATCHES) == NAMES


@pytest.mark.parametrize("name", sweep(NAMES, *({*NAMES} - {*AT_NIGHT})))
def test_decisions_are_those_that_are_recorded(replayed: Callable[[str], Path], name: str) -> None:
    found = [*differences(Record.load(DATA / f"{name}.npz"), Record.load(replayed(name) / f"{name}.npz"))]
    assert not found, "\n".join([f"{len(found)} differ, the first ones:", *found[:MOST_SHOWN]])
