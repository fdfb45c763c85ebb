"""A batch job finds what `LLM.generate` finds, in one go or in several."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.engine import ROOT, TRAINED_TARGET, Engines
from vllm_trie import beam_params
from vllm_trie.batch.__main__ import INTERRUPTED
from vllm_trie.batch.search import BatchSearcher

pytestmark = pytest.mark.slow

SECONDS = 600
MARK = "TRIE_BATCH_TEST"  # an environment variable that all processes of a job inherit


def test_a_hypothesis_along_a_catalog_has_the_id_of_its_item(engines: Engines) -> None:
    searcher, items = object.__new__(BatchSearcher), ["return", "raise", "yield from"]
    searcher._llm = engines(TRAINED_TARGET).llm
    searcher._params = beam_params(4, n=4, allowed_sequences=items, max_tokens=6, beam_results=True)
    (answer,) = searcher._search(["def close(self):\n    "])
    found = answer["hypotheses"]
    assert sorted(hypothesis["text"] for hypothesis in found) == sorted(items)
    assert [items[hypothesis["item_id"]] for hypothesis in found] == [hypothesis["text"] for hypothesis in found]


def test_a_score_is_what_hypotheses_compete_by(engines: Engines) -> None:
    searcher, options = object.__new__(BatchSearcher), {"phrase_boosts": [("return", 3.0)], "max_tokens": 8}
    searcher._llm = engines(TRAINED_TARGET).llm
    searcher._params = beam_params(4, n=4, **options, beam_results=True)
    (answer,) = searcher._search(["def is_prime(number):"])
    found = answer["hypotheses"]
    assert any("return" in hypothesis["text"] for hypothesis in found)
    scores = [hypothesis["score"] for hypothesis in found]
    assert scores == sorted(scores, reverse=True)
    sums = [hypothesis["cumulative_logprob"] + 3.0 * hypothesis["text"].count("return") for hypothesis in found]
    assert scores == pytest.approx(
        [total / len(h["token_ids"]) for total, h in zip(sums, found, strict=True)], abs=1e-4
    )


NAMES = "close open read write __init__ run stop get set start send copy update clear next add remove flush"
TEXTS = [f"def {name}(self):" for name in NAMES.split()]  # enough to be interrupted among them, however late
TOO_LONG = "x = 1\n" * 600
BATCH = ["--batch-size", "2", "--beam-width", "6", "--n", "3", "--max-tokens", "128", "--length-penalty", "0.5"]
ENGINE = [
    "--dtype",
    "float32",
    "--enforce-eager",
    "--max-model-len",
    "512",
    "--kv-cache-memory-bytes",
    str(1 << 28),
]


def start_job(folder: Path, mark: str, *options: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vllm_trie.entrypoints.batch", "--model", str(TRAINED_TARGET), *BATCH, *ENGINE]
    files = ["--input", str(folder / "in.jsonl.gz"), "--output", str(folder / "out.jsonl"), "--field", "text"]
    hidden = ("VLLM_PLUGINS", "VLLM_ENABLE_V1_MULTIPROCESSING")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {MARK: mark, "RAY_AUTH_MODE": "disabled", "TORCHDYNAMO_DISABLE": "1"} | variables
    return subprocess.Popen(
        [*command, *files, *options],
        cwd=ROOT,
        env=environment,
        text=True,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which jobs in a shell's background ignore
    )


def living(mark: str) -> list[str]:
    """The processes of a job, wherever they have gone."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def wait_until_nothing_lives(mark: str) -> None:
    deadline = time.monotonic() + 60
    while survivors := living(mark):
        assert time.monotonic() < deadline, survivors
        time.sleep(0.2)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.nightly
def test_a_job_that_was_interrupted_goes_on_and_finds_what_generate_finds(engines: Engines, tmp_path: Path) -> None:
    texts, output, mark = [*TEXTS, TOO_LONG], tmp_path / "out.jsonl", uuid.uuid4().hex
    with gzip.open(tmp_path / "in.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text, "id": f"no {n}"}) + "\n" for n, text in enumerate(texts))

    yielding = {"RAY_worker_niceness": "5"}  # engines that let the job write each answer before they find the next one
    job = start_job(tmp_path, mark, **yielding)
    deadline = time.monotonic() + SECONDS
    while not (output.exists() and output.read_text().count("\n") >= 2):
        assert job.poll() is None, job.stderr and job.stderr.read()[-3000:]
        assert time.monotonic() < deadline, "the job does not begin"
        time.sleep(0.02)
    os.killpg(job.pid, signal.SIGINT)
    _, said = job.communicate(timeout=SECONDS)
    assert job.returncode == INTERRUPTED, said[-3000:]
    assert said.strip().endswith(f"interrupted; run the same command again to continue {output}")
    wait_until_nothing_lives(mark)
    before = output.read_text()
    assert 2 <= before.count("\n") < len(texts)

    output.write_text(before + '{"id": "no 17", "pro')  # as if it had been killed while it wrote
    in_actors = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # engines without processes of their own start sooner
    _, said = (job := start_job(tmp_path, mark, "--num-engines", "2", **in_actors)).communicate(timeout=SECONDS)
    assert job.returncode == 1, said[-3000:]
    assert said.strip().endswith(f'1 prompts could not be searched; see "error" in {output}')
    wait_until_nothing_lives(mark)
    assert output.read_text().startswith(before)

    rows = rows_of(output)
    assert all(row["search"].items() >= {"beam_width": 6, "n": 3, "length_penalty": 0.5}.items() for row in rows)
    assert [(row["id"], row["prompt"]) for row in rows] == [(f"no {n}", text) for n, text in enumerate(texts)]
    assert rows[-1]["hypotheses"] == []
    assert "512" in rows[-1]["error"]
    params = beam_params(6, n=3, max_tokens=128, length_penalty=0.5)
    expected = engines(TRAINED_TARGET).llm.generate(TEXTS, params, use_tqdm=False)
    for row, output_of_one in zip(rows, expected, strict=False):
        for ours, theirs in zip(row["hypotheses"], output_of_one.outputs, strict=True):
            assert ours.keys() == {"text", "token_ids", "cumulative_logprob", "score", "finish_reason"}
            assert (ours["text"], ours["token_ids"]) == (theirs.text, list(theirs.token_ids))
            assert ours["finish_reason"] == theirs.finish_reason
            assert ours["cumulative_logprob"] == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
            score = ours["cumulative_logprob"] / len(ours["token_ids"]) ** 0.5
            assert ours["score"] == pytest.approx(score, rel=1e-5)
