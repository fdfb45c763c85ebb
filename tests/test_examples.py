"""The commands of examples/ that need no server run, on the toy; `make examples` lets them run on the real model.

What hears is a tiny random Whisper, and Whisper base. The others run in behaviour/serving/one_server/test_examples.py.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray
import vllm
from vllm.multimodal.media import audio

from benchmarks.common import PAIR, TARGET
from benchmarks.whisper_base.speech import SPEAKER, as_wav, say, speaker_is_here
from tests.support.audio import make_whisper, recording
from tests.support.documents import DOCUMENTS, EXAMPLE_COMMANDS, are_shown_alike
from tests.support.engine import ROOT
from tests.support.sounds import soundfile
from vllm_trie.catalog import Catalog

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

COMMANDS = [command for command in EXAMPLE_COMMANDS if "client.py" not in command]
ON_RAY = [command for command in COMMANDS if "ray_data" in command]
HEAR = [command for command in COMMANDS if "transcribe" in command]
MAKE_ITEMS = [command for command in COMMANDS if "make_items" in command]
OFFLINE = [command for command in COMMANDS if command not in (*ON_RAY, *HEAR, *MAKE_ITEMS)]
SHARE_AN_ENGINE = ("correct", "self_evaluate", "solve_by_steps")  # in a row; a reward model's end is that of the engine
OFFLINE.sort(key=lambda command: next((i for i, name in enumerate(SHARE_AN_ENGINE) if f"/{name}/" in command), 3))

Run = Callable[..., str]


@pytest.fixture
def models(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that README.md tells its readers to set."""
    is_real = os.environ.get("EXAMPLES_MODEL") == "real"
    model, draft = map(request.getfixturevalue, ("real_model", "real_draft")) if is_real else (TARGET, PAIR / "draft")
    monkeypatch.setenv("MODEL", str(model))
    monkeypatch.setenv("DRAFT", str(draft))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where commands put what they make."""
    return tmp_path_factory.mktemp("made")


@pytest.fixture
def run(models: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(command, word="other")` runs it with some words replaced, and returns what it shows."""

    def run(command: str, **replaced: str) -> str:
        script, *arguments = (replaced.get(word, word) for word in shlex.split(os.path.expandvars(command)))
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        monkeypatch.chdir(ROOT)
        runpy.run_path(script, run_name="__main__")
        shown = capsys.readouterr().out
        with capsys.disabled():
            print(shown if os.environ.get("EXAMPLES_MODEL") == "real" else "", end="")
        return shown

    return run


@pytest.fixture
def hears(with_shared_engines: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sound files can be read, and engines hold half of what their Whisper can."""
    stock = vllm.LLM

    def make(model: str, **options: Any) -> Any:
        longest = json.loads((Path(model) / "config.json").read_text())["max_target_positions"]
        return stock(model, max_model_len=longest // 2, **options)

    monkeypatch.setattr(vllm, "LLM", make)
    monkeypatch.setattr(audio, "soundfile", soundfile)


@pytest.mark.parametrize("command", OFFLINE, ids=lambda command: command.split()[0])
@pytest.mark.usefixtures("with_shared_engines")
def test_an_example_runs(command: str, run: Run, folder: Path) -> None:
    shown = run(command, reward_model=str(folder / "reward_model"))
    assert re.search(r"^  .*\d", shown, re.MULTILINE), shown


@pytest.mark.parametrize("command", MAKE_ITEMS, ids=lambda command: command.split()[0])
def test_a_million_items_become_a_catalog(command: str, run: Run, folder: Path) -> None:
    items, catalog = folder / "items-1.jsonl", folder / "items-1.catalog"
    assert "1,000,000 items of 4 tokens" in run(command, **{"items-1.jsonl": str(items)})
    build = [sys.executable, "-m", "vllm_trie.catalog", "build", items, catalog, "--vocab-size", "2048"]
    subprocess.run(build, cwd=ROOT, check=True)
    assert (Catalog.open(catalog).num_items, Catalog.open(catalog).longest) == (1_000_000, 4)


@pytest.mark.parametrize("command", HEAR, ids=lambda command: command.split()[0])
@pytest.mark.usefixtures("hears")
def test_a_sound_file_is_transcribed(command: str, run: Run, folder: Path) -> None:
    (folder / "speech.wav").write_bytes(recording(7, seconds=1.8)[0])
    whisper = make_whisper(folder / "whisper")
    shown = run(command, **{"openai/whisper-small": str(whisper), "speech.wav": str(folder / "speech.wav")})
    parts = [re.findall(r"^  +(-\d\S+) ", part, re.MULTILINE) for part in shown.split("from second")[1:]]
    assert len(parts) > 1
    for scores in parts:  # of samples, which may be the same, if a search is doubtful
        assert 0 < len(scores) <= 5
        assert scores == sorted(scores, key=float, reverse=True)


@pytest.mark.parametrize("command", HEAR, ids=lambda command: command.split()[0])
@pytest.mark.skipif(not speaker_is_here(), reason=f"{SPEAKER} is not installed")
@pytest.mark.usefixtures("hears")
def test_a_sentence_is_heard_as_its_page_shows(command: str, run: Run, folder: Path, speech_model: Path) -> None:
    page = DOCUMENTS["examples/transcribe/README.md"]
    (sentence, output) = re.findall(r'espeak-ng says "(.*)":\n\n((?:    .*\n)+)', page)[0]
    (folder / "speech.wav").write_bytes(as_wav(say(sentence, "en")))
    shown = run(command, **{"openai/whisper-small": str(speech_model), "speech.wav": str(folder / "speech.wav")})
    assert are_shown_alike(shown, output), shown


@pytest.mark.parametrize("command", ON_RAY, ids=lambda command: command.split()[0])
def test_a_dataset_is_answered(command: str, run: Run, folder: Path) -> None:
    quiet = {"include_dashboard": False, "log_to_driver": False}
    with ray.init(num_cpus=2, **quiet, _system_config={"prestart_worker_first_driver": False}):
        run(f"{command} --enforce-eager", **{"answers.jsonl": str(folder / "answers.jsonl")})
    prompts = (ROOT / "examples" / "ray_data" / "prompts.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    expected = [(json.loads(line)["id"], rank) for line in prompts for rank in (0, 1)]
    assert [(answer["id"], answer["rank"]) for answer in answers] == expected
    assert all(best["logprob"] > second["logprob"] for best, second in zip(answers[::2], answers[1::2], strict=True))
