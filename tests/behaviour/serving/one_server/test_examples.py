"""The clients of examples/ run; their server has another model and another catalog."""

from __future__ import annotations

import asyncio
import re
import runpy
import shlex
import sys

import pytest

from benchmarks.server import Server
from examples.retrieve.client import replace
from tests.support.documents import EXAMPLE_COMMANDS
from tests.support.engine import ROOT
from tests.support.served import NEWER

pytestmark = pytest.mark.slow

REPLACES = [command for command in EXAMPLE_COMMANDS if "--replace-by" in command]
CLIENTS = [command for command in EXAMPLE_COMMANDS if "client.py" in command and command not in REPLACES]
HERE = {"smollm2": "target", "items": "lines", "items-2.catalog": "newer.catalog"}


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


@pytest.mark.parametrize("command", REPLACES, ids=lambda command: command.split()[0])
def test_a_client_of_the_examples_replaces_a_version(
    server: Server, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        run(server, command, monkeypatch)
        assert re.search(rf"^  lines: {len(NEWER)} items, digest \w+$", capsys.readouterr().out, re.MULTILINE)
    finally:
        asyncio.run(replace([server.url], "lines", "lines.catalog"))
