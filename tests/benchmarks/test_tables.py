"""The benchmarks' one command, on its smallest setting."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.__main__ import OF_PAPERS, TABLES, main
from benchmarks.report import fill_in
from benchmarks.tables.host import PARTS
from tests.support.engine import Engines, freeze_all_there_is
from tests.support.forks import Fork

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module")
def measured(_engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the whole benchmark left its results. It runs in this process, which starts sooner."""
    _engines.close()
    freeze_all_there_is()
    out = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # and as it was afterwards: an engine's start sets it
        assert main(["--size", "minimal", "--out", str(out), "--only", *OF_PAPERS, "host"]) == 0
    return out


def rows_of(out: Path, name: str) -> list[dict]:
    content = json.loads((out / f"{name}.json").read_text())
    return [dict(zip(content["columns"], row, strict=True)) for cell in content["cells"] for row in cell["rows"]]


def test_every_table_is_measured_and_every_plot_drawn(measured: Path) -> None:
    for name in OF_PAPERS:
        assert rows_of(measured, name), name
    tables = (measured / "tables.md").read_text()
    assert all(TABLES[name].title in tables for name in OF_PAPERS)
    for picture in (
        "memory_by_step",
        "overlap_by_width",
        "throughput_by_width",
        "reclamation_by_step",
        "front_of_widths",
    ):
        assert (measured / f"{picture}.png").read_bytes().startswith(b"\x89PNG")


def test_every_part_of_a_step_is_met(measured: Path) -> None:
    for row in rows_of(measured, "host"):
        assert all(row[part] > 0 for part in PARTS), row


def test_blocks_are_those_of_the_floor_at_interval_1_and_dead_ones_are_explained_at_15(measured: Path) -> None:
    by_search = {row["search"]: row for row in rows_of(measured, "ablation")}
    assert by_search["reclaimed every 1 steps"]["peak over floor, worst"] <= 1.05
    assert by_search["reclaimed every 15 steps"]["dead blocks, most"] > 0
    assert by_search["no sharing"]["peak blocks"] > by_search["reclaimed never"]["peak blocks"]


def test_sharing_changes_no_log_probability_and_no_hypothesis(measured: Path) -> None:
    (row,) = rows_of(measured, "fidelity")
    assert row["max |Δ log p|"] < 1e-4
    assert row["different"] == 0
    assert row["all hypotheses identical"] + row["near-ties"] == row["searches"]


def test_results_can_show_the_tables_of_the_dsbd_paper(measured: Path) -> None:
    """As RESULTS.md is to name them once they are measured."""
    shown = "with drafts + without + layers accepted, a + steps per forward by Theorem 3.2 + steps per forward"
    of_grid = "search + layers + draft width + threshold + least width + steps per forward + mean log p"
    places = [
        f"dsbd; show {shown} + times faster (95 %) + mean log p, with (95 %)",
        f"dsbd_grid; front = yes; show {of_grid}",
    ]
    text = "".join(f"<!-- table: {place} -->\n<!-- end -->\n" for place in places)
    filled = fill_in(text, measured)
    assert "| beam sampling, 4 | beam sampling, 4 |" in filled
    assert "Front: yes." in filled


@pytest.fixture
def here(engines: Engines, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What the benchmark says, run in this process likewise."""
    engines.close()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    def bench(arguments: Sequence[str], status: int = 0) -> str:
        assert main(arguments) == status
        return capsys.readouterr().out

    return bench


def test_a_rerun_measures_nothing_again_and_another_setting_does(
    measured: Path, tmp_path: Path, here: Callable[..., str]
) -> None:
    for name in ("reclamation", "energy"):  # times, which no second measurement finds again
        (tmp_path / f"{name}.json").write_bytes((measured / f"{name}.json").read_bytes())
    minimal = ["--size", "minimal", "--out", str(tmp_path)]
    assert TABLES["reclamation"].title in here([*minimal, "--only", "reclamation", "energy"])
    for name in ("reclamation", "energy"):
        assert rows_of(tmp_path, name) == rows_of(measured, name)
    assert "measured with other settings" in here([*minimal, "--only", "energy", "--widths", "2"])
    assert {row["beams"] for row in rows_of(tmp_path, "energy")} == {2}


def test_searches_by_steps_answer_alike_wherever_their_kv_comes_from(tmp_path: Path, here: Callable[..., str]) -> None:
    here(["--size", "minimal", "--only", "steps_scored", "--out", str(tmp_path)])
    (row,) = rows_of(tmp_path, "steps_scored")
    assert row["same answers"] == "1 of 1"
    assert row["rounds"] > 1


def test_an_interrupted_run_keeps_its_rows_and_goes_on(tmp_path: Path, here: Callable[..., str]) -> None:
    options = ["--size", "minimal", "--only", "memory", "--widths", "2", "3", "4", "5", "--max-tokens", "32"]
    options += ["--out", str(tmp_path)]
    log = tmp_path / "log"
    with log.open("w") as output:
        process = Fork(["-m", "benchmarks", *options], os.environ, output)
    deadline = time.monotonic() + 300
    while not (tmp_path / "memory.json").exists():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    status, printed = process.wait(120), log.read_text()
    assert status == 130, printed[-3000:]
    assert "goes on from there" in " ".join(printed.split())  # lines end where the terminal does
    kept = rows_of(tmp_path, "memory")
    assert kept
    assert len(kept) < 4
    here(options)
    finished = rows_of(tmp_path, "memory")
    assert finished[: len(kept)] == kept
    assert [row["beams"] for row in finished] == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "memry"], "invalid choice: 'memry'"),
        (["--widths", "0"], "'0' is not a whole number >= 1"),
        (["--prompts", "nowhere.jsonl"], "--prompts nowhere.jsonl: no such file"),
        (["--prompts", "code", "a.jsonl", "--field", "x", "y"], "--field: 2 fields for 1 files"),
        (["--prompts", "code", "code"], "two sets of one name"),
        (["--widths", "4", "600"], "--widths: 600 beams are more than the 512 rows"),
        (["--max-tokens", "3"], "--max-tokens 3: tables need 4 or more"),
        (["--kv-cache-gib", "0"], "--kv-cache-gib 0.0: more than 0"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_a_wrong_option_is_named(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(options)
    assert message in f"{refused.value}{capsys.readouterr().err}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--only", "memory", "energy", "--kv-cache-gib", "0.008", "--widths", "20"],
            "KV blocks are too few to count on",
        ),
        (["--only", "memory", "energy", "--prompts", "few.jsonl"], "1 prompts, and this run needs 2"),
    ],
)
def test_what_cannot_be_measured_is_told_and_the_rest_goes_on(
    options: list[str], message: str, tmp_path: Path, here: Callable[..., str]
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "def one():"}\n')
    options = [str(few) if option == few.name else option for option in options]
    assert message in " ".join(here(["--size", "minimal", "--out", str(tmp_path), *options], status=1).split())
    assert rows_of(tmp_path, "energy")


def test_attention_over_shared_blocks_is_measured_beside_vllms_and_beside_sampling(
    tmp_path: Path, here: Callable[..., str]
) -> None:
    here(["--size", "minimal", "--only", "attention", "shared", "--widths", "8", "--out", str(tmp_path)])
    assert [row["attention"] for row in rows_of(tmp_path, "attention")] == ["MHA", "GQA 8:2"]
    (row,) = rows_of(tmp_path, "shared")
    assert (row["attention"], row["beams"]) == ("GQA 6:2", 8)
