"""`make demo` runs to the end and shows what it promises, on the real model and on the toy."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import demo
from benchmarks.demo_prompts import REAL_TASKS, Subject, toy
from benchmarks.model_wheels import UnavailableError
from benchmarks.whisper_base import get as whisper
from benchmarks.whisper_base.speech import speaker_is_here
from tests.support.engine import Engines, freeze_all_there_is
from tests.support.forks import Fork

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PROMISED = (
    "1. ANSWERS",
    "greedy",
    "4 beams in the engine",
    "4 beams, vLLM's own loop",
    "2. MEMORY",
    "beams apart would hold",
    "3. TIME",
    "loop, times ours",
    "4. A DRAFT MODEL",
    "steps per forward",
)


@pytest.mark.parametrize("options", [["--toy", "--tasks", "1"], ["--tasks", "1"]], ids=["toy", "real"])
@pytest.mark.usefixtures("_model_if_asked_for")
def test_demo_shows_answers_blocks_times_and_drafts(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """In this process, and shorter than its users see it."""
    engines.close()
    freeze_all_there_is()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # and as it was afterwards: an engine's start sets it
    monkeypatch.setattr(demo, "TIMED_TOKENS", 8)
    monkeypatch.setattr(demo, "BLOCKS_TOKENS", 40)
    monkeypatch.setattr(sys, "argv", ["demo", "--repeats", "1", *options])
    assert demo.main() == 0
    shown = capsys.readouterr().out
    assert [promised for promised in PROMISED if promised not in shown] == []
    assert ("5. SPEECH" in shown) == (whisper.is_at_hand() and speaker_is_here())
    if "--toy" not in options:
        assert "Paris" in shown


@pytest.fixture
def _model_if_asked_for(request: pytest.FixtureRequest) -> None:
    if "real" in request.node.callspec.id:
        request.getfixturevalue("real_draft")


def test_where_the_model_cannot_be_had_one_sentence_says_why_and_the_toy_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = list[tuple[Any, ...]]()

    def missing() -> Subject:
        raise UnavailableError("the model cannot be had: no network")

    monkeypatch.setattr(demo, "real", missing)
    monkeypatch.setattr(demo, "demonstrate", lambda *args: shown.append(args))
    monkeypatch.setattr(sys, "argv", ["demo"])
    assert demo.main() == 0
    assert shown == [(toy(), None, 2)]
    assert "cannot be had: no network" in capsys.readouterr().out


def test_the_prompts_are_of_the_kinds_that_people_send() -> None:
    assert [task.name for task in REAL_TASKS] == [
        *("a fact", "a translation", "a summary", "a function", "JSON by a schema", "a chat"),
    ]


def test_an_interrupt_ends_it_without_a_traceback(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = Fork(["-m", "benchmarks.demo", "--toy"], os.environ, stdout, stderr)
    while "Starting vLLM" not in out.read_text():
        assert process.poll() is None, err.read_text()[-2000:]
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == demo.INTERRUPTED, err.read_text()[-2000:]
    assert "Interrupted." in out.read_text()
    assert "Traceback" not in err.read_text()
