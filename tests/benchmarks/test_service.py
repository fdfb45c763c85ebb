"""The load on a retrieval service: who asks when, what is reported, and the table beside its peers."""

from __future__ import annotations

import asyncio
import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from benchmarks import arrivals
from benchmarks.__main__ import main
from benchmarks.arrivals import Load, closed_loop, open_loop, read_requests
from benchmarks.harness import Setting
from benchmarks.tables import service
from examples.retrieve.client import QUESTIONS
from tests.support.engine import Engines
from vllm_trie.catalog import Catalog


def test_open_arrivals_wait_for_no_answer() -> None:
    async def run() -> Load:
        all_have_arrived = asyncio.Barrier(20)
        return await asyncio.wait_for(open_loop(lambda _: all_have_arrived.wait(), range(20), rate=1000), 60)

    assert len(asyncio.run(run()).seconds) == 20


def test_arrivals_are_poisson_and_a_time_counts_from_when_a_request_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(arrivals.asyncio, "sleep", sleep)
    monkeypatch.setattr(arrivals.time, "perf_counter", lambda: 100.0)

    async def ask(_: int) -> None: ...

    load = asyncio.run(open_loop(ask, range(2000), rate=4))
    gaps = np.diff(slept, prepend=0.0)
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 4, rel=0.1)
    assert load.seconds.tolist() == pytest.approx([-one for one in slept])


def test_closed_clients_ask_one_after_the_other() -> None:
    running = most = 0
    asked = []

    async def ask(request: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        asked.append(request)
        await asyncio.sleep(0)
        running -= 1

    load = asyncio.run(closed_loop(ask, range(10), 3))
    assert (most, sorted(asked), len(load.seconds)) == (3, [*range(10)], 10)


def test_a_request_that_fails_ends_a_load() -> None:
    async def fail(_: int) -> None:
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        asyncio.run(open_loop(fail, range(3), rate=1000))
    with pytest.raises(RuntimeError, match="refused"):
        asyncio.run(closed_loop(fail, range(3), 2))


def test_percentiles_are_times_that_occurred() -> None:
    load = Load(np.arange(1, 101)[::-1] / 1000, duration=4.0)
    assert load.percentiles == pytest.approx([51.0, 96.0, 100.0])
    assert load.per_second == 25.0
    assert Load(np.array([0.5, 0.1]), 1.0).percentiles == [500.0, 500.0, 500.0]


def test_requests_come_from_a_file_of_prompts_with_histories(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "a", "history": [7, 8], "user": 3}\n{"prompt": [1, 2]}\n')
    assert read_requests(path) == [{"prompt": "a", "history": [7, 8]}, {"prompt": [1, 2], "history": ()}]
    assert [request["prompt"] for request in read_requests(None)] == QUESTIONS


@pytest.mark.parametrize("line", ["", "[1, 2]", '{"text": "a"}', '"a"', "{"])
def test_a_line_that_is_no_request_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(
        SystemExit, match=r'^python -m benchmarks\.arrivals: line 2 of .* is no object with a "prompt"$'
    ):
        arrivals.main(["--rate", "1", "--input", str(path)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "one of the arguments --rate --clients is required"),
        (["--rate", "0"], "'0' is no number above 0"),
        (["--rate", "inf"], "'inf' is no number above 0"),
        (["--clients", "1.5"], "'1.5' is no number above 0"),
        (["--rate", "1", "--clients", "2"], "not allowed with argument"),
        (["--rate", "1", "--search-options", "[1"], "'[1' is no JSON object"),
    ],
)
def test_a_wrong_option_is_named(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arrivals.main(options)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("options", "message"), [(["--input", "none.jsonl"], "No such file"), ([], "does not answer")])
def test_no_file_and_no_server_end_in_a_sentence(options: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        arrivals.main(["--url", "http://127.0.0.1:1", "--rate", "1", *options])


def test_prompts_are_the_ends_of_histories_and_as_long_as_asked_for() -> None:
    items = np.arange(300).reshape(100, 3)
    catalog = Catalog.from_sequences(items.tolist(), ids=[*range(700, 800)])
    for asked, length in ((None, 126), (30, 30), (2, 3)):
        first, second = islice(service.users(Setting(prompt_tokens=asked), catalog, "a"), 2)
        assert first != second
        assert next(service.users(Setting(prompt_tokens=asked), catalog, "b")) not in (first, second)
        assert len(first.prompt) == len(second.prompt) == length
        found = catalog.find(np.array(first.prompt).reshape(-1, 3)).tolist()
        assert first.history[-len(found) :] == found
        assert len(first.history) == service.HISTORY


@pytest.mark.slow
@pytest.mark.nightly
def test_a_service_is_measured_beside_its_peers(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.close()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    options = ["--size", "minimal", "--only", "service", "--prompt-tokens", "16", "--out", str(tmp_path)]
    assert main(options) == 0
    content = json.loads((tmp_path / "service.json").read_text())
    rows = [dict(zip(content["columns"], row, strict=True)) for cell in content["cells"] for row in cell["rows"]]
    assert {row["search"] for row in rows} == {*service.SEARCHES}
    for row in rows:
        assert row["requests"] > 0
        assert row["p50, ms"] <= row["p95, ms"] <= row["p99, ms"]
