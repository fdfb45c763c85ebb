"""The clients of examples/ run; their server has another model and another catalog."""

from __future__ import annotations

import re
import runpy
import shlex
import sys

import pytest

from benchmarks.server import Server
from tests.support.documents import EXAMPLE_COMMANDS
from tests.support.engine import ROOT

pytestmark = pytest.mark.slow

CLIENTS = [command for command in EXAMPLE_COMMANDS if "client.py" in command]
HERE = {"smollm2": "target", "items": "lines", "200": "5"}


def run(server: Server, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script, *arguments = (HERE.get(word, word) for word in shlex.split(command))
    monkeypatch.setattr(sys, "argv", [script, *arguments, "--url", server.url])
    monkeypatch.chdir(ROOT)
    runpy.run_path(script, run_name="__main__")


@pytest.mark.parametrize("command", CLIENTS, ids=lambda command: command.split()[0])
def test_a_client_of_the_examples_runs(
    server: Server, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(server, command, monkeypatch)
    shown = capsys.readouterr().out
    assert len(re.findall(r"^  .*\S", shown, re.MULTILINE)) >= 9
    if "--requests" in command:
        assert re.search(r"^5 requests: .* a second", shown, re.MULTILINE)
