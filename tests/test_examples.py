"""The commands of examples/ that need no server run, on the toy; `make examples` lets them run on the real model.

The others run in behaviour/serving/one_server/test_examples.py.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys

import pytest

from benchmarks.common import PAIR, TARGET
from tests.support.documents import EXAMPLE_COMMANDS
from tests.support.engine import ROOT

pytestmark = pytest.mark.slow

COMMANDS = [command for command in EXAMPLE_COMMANDS if "$MODEL" in command]
COMMANDS.sort(key=lambda command: "--draft" in command)  # those that share an engine in a row


@pytest.fixture
def models(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that README.md tells its readers to set."""
    is_real = os.environ.get("EXAMPLES_MODEL") == "real"
    model, draft = map(request.getfixturevalue, ("real_model", "real_draft")) if is_real else (TARGET, PAIR / "draft")
    monkeypatch.setenv("MODEL", str(model))
    monkeypatch.setenv("DRAFT", str(draft))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[0])
@pytest.mark.usefixtures("models", "with_shared_engines")
def test_an_example_runs(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script, *arguments = shlex.split(os.path.expandvars(command))
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.chdir(ROOT)
    runpy.run_path(script, run_name="__main__")
    shown = capsys.readouterr().out
    with capsys.disabled():
        print(shown if os.environ.get("EXAMPLES_MODEL") == "real" else "", end="")
    assert re.search(r"^  .*\d", shown, re.MULTILINE), shown
