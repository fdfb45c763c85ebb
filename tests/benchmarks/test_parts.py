"""What tables are made with: prompts, models made from others, statistics, meters, and the report."""

from __future__ import annotations

import gzip
import json
import math
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import models, picture, report
from benchmarks.common import TARGET, alternate
from benchmarks.prompts import CODE, PromptSet
from benchmarks.significance import interval, paired
from benchmarks.smollm2 import get
from benchmarks.tables.energy import meters
from benchmarks.tables.reclamation import most_dead
from benchmarks.watch import Steps
from benchmarks.whisper_base import get as whisper

pytestmark = pytest.mark.slow

PROMPT = torch.arange(5, 105)[None]


def logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(PROMPT).logits


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl.gz"
    with gzip.open(path, "wt") as lines:
        lines.writelines(json.dumps({"question": f"What is {n} and {n}?"}) + "\n" for n in range(4))
    return path


def test_prompts_come_from_a_gzipped_file_and_a_field_of_choice(stored: Path) -> None:
    assert PromptSet("questions", stored, "question").texts(2) == ["What is 0 and 0?", "What is 1 and 1?"]
    with pytest.raises(ValueError, match=r"--field prompt: line 1 of .* has question"):
        PromptSet("questions", stored).texts(1)
    with pytest.raises(ValueError, match="4 prompts, and this run needs 5"):
        PromptSet("questions", stored, "question").texts(5)


def test_prompts_of_one_length_begin_as_the_tokenizer_begins(stored: Path) -> None:
    for prompts in (CODE, PromptSet("questions", stored, "question")):
        tokens = prompts.tokens(str(TARGET), 2, 16)
        assert [len(one) for one in tokens] == [16, 16]
        assert tokens[0][0] == tokens[1][0] == CODE.tokens(str(TARGET), 1)[0][0]
    with pytest.raises(ValueError, match="too little text for 9 prompts of 64 tokens"):
        PromptSet("questions", stored, "question").tokens(str(TARGET), 9, 64)


def test_models_with_full_heads_or_further_layers_compute_the_same(tmp_path: Path) -> None:
    expected = logits(TARGET)
    full = models.make(models.FULL_HEADS, str(TARGET), tmp_path / "full")
    torch.testing.assert_close(logits(full), expected, atol=1e-4, rtol=1e-4)
    assert models.attention_of(str(full), models.AS_IT_IS) == "MHA"
    deeper = models.make("3x deeper", str(TARGET), tmp_path / "deeper")
    torch.testing.assert_close(logits(deeper), expected, atol=1e-4, rtol=1e-4)
    copies, deep_copies = (
        logits(models.make(variant, str(TARGET), tmp_path / variant))
        for variant in (models.COPIES, f"{models.COPIES}, 2x deeper")
    )
    torch.testing.assert_close(copies, deep_copies, atol=1e-4, rtol=1e-4)


def test_a_model_with_a_window_computes_the_same_until_something_leaves_it(tmp_path: Path) -> None:
    window = models.make(models.WINDOW, str(TARGET), tmp_path / "window")
    assert models.attention_of(str(window), models.AS_IT_IS) == f"GQA 6:2, window {models.WINDOW_TOKENS}"
    torch.testing.assert_close(logits(window), logits(TARGET), atol=1e-4, rtol=1e-4)
    long = torch.arange(5, 305)[None]
    with torch.inference_mode():
        ends = [
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(long).logits[0, -1]
            for folder in (window, TARGET)
        ]
    assert (ends[0] - ends[1]).abs().max() > 1e-3


def test_intervals_and_paired_tests_are_students() -> None:
    # t(0.975, 2) = 4.3027, standard error 1 / sqrt(3)
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - 4.3027 / math.sqrt(3), 2 + 4.3027 / math.sqrt(3)), 1e-4)
    assert str(interval([2.0])) == "2"
    # logs of 2, 2 and 4 against 1: mean 1.155, standard error 0.462 / 2: t = 4.0 with 2 degrees of freedom
    pairs = paired([2.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    assert (pairs.n, pairs.p) == (3, pytest.approx(0.0572, abs=1e-3))
    assert pairs.ratio.mean == pytest.approx(16 ** (1 / 3))
    # Nothing varies, but for rounding.
    assert math.isnan(paired([0.1, 0.3, 0.6], [0.2, 0.6, 1.2]).p)
    with pytest.raises(ValueError, match="zip"):
        paired([1.0], [1.0, 2.0])


def test_energy_is_read_from_packages_alone_and_across_a_wrap(tmp_path: Path) -> None:
    for name, counter in {"intel-rapl:0": 900, "intel-rapl:0:1": 5}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{counter}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("1000\n")
        (tmp_path / name / "name").write_text("package-0\n")
    (meter,) = [meter for meter in meters(tmp_path) if not meter.name.startswith("GPU")]
    assert meter.name == "package-0"
    assert meter.joules(lambda: (tmp_path / "intel-rapl:0/energy_uj").write_text("100\n")) == pytest.approx(200e-6)


def test_a_report_replaces_what_is_between_its_marks_and_nothing_else(tmp_path: Path) -> None:
    content = {
        "title": "T",
        "columns": ["a", "|b|"],
        "note": "measured",
        "command": "python -m benchmarks",
        "machine": {"cores": 2, "processor": "P", "vllm": "1", "engine": "E"},
        "cells": [{"cell": [1], "rows": [[1.23456, "x"]], "series": {}}],
    }
    (tmp_path / "memory.json").write_text(json.dumps(content))
    text = "before\n<!-- table: memory -->\nold\n<!-- end -->\nafter\n"
    filled = report.fill_in(text, tmp_path)
    assert filled.startswith("before\n<!-- table: memory -->\n| a | \\|b\\| |\n|---|---|\n| 1.23 | x |\n")
    assert filled.endswith("\n`python -m benchmarks` ([all rows](docs/results/memory.md))\n<!-- end -->\nafter\n")
    assert "old" not in filled
    assert report.fill_in(filled, tmp_path) == filled
    with pytest.raises(FileNotFoundError):
        report.fill_in(text.replace("memory", "nothing"), tmp_path)


def test_a_report_shows_one_value_in_a_column_for_each_of_what_another_holds(tmp_path: Path) -> None:
    rows = [["code", 3, 0.5, "x"], ["code", 9, 0.25, "x"], ["GSM8K", 3, "", "x"], ["GSM8K", 9, 0.75, "x"]]
    content = {
        "columns": ["prompts", "beams", "ratio", "other"],
        "note": "measured",
        "command": "python -m benchmarks",
        "machine": {"cores": 2, "processor": "P", "vllm": "1", "engine": "E"},
        "cells": [{"cell": [row[:2]], "rows": [row], "series": {}} for row in rows],
    }
    (tmp_path / "memory.json").write_text(json.dumps(content))
    text = "<!-- table: memory, ratio by beams -->\n<!-- end -->"
    table = "| prompts | 3 beams | 9 beams |\n|---|---|---|\n| code | 0.5 | 0.25 |\n| GSM8K |  | 0.75 |\n"
    assert f"{table}\nRatio. `" in report.fill_in(text, tmp_path)
    with pytest.raises(ValueError, match="width"):
        report.fill_in(text.replace("beams", "width"), tmp_path)

    kept = "<!-- table: memory; beams = 3 or 9; prompts = code; show ratio + beams -->\n<!-- end -->"
    table = "| ratio | beams |\n|---|---|\n| 0.5 | 3 |\n| 0.25 | 9 |\n"
    assert f"{table}\nPrompts: code. `" in report.fill_in(kept, tmp_path)
    with pytest.raises(ValueError, match="no row has prompts = cod"):
        report.fill_in(kept.replace("= code", "= cod"), tmp_path)


def test_the_overlap_of_the_memory_table_is_a_page_of_its_own(tmp_path: Path) -> None:
    content = {
        "title": "T",
        "columns": ["prompts", "beams", "overlap"],
        "note": "measured",
        "cells": [{"rows": [["code", 3, 0.5], ["code", 9, 0.25]]}],
    }
    (tmp_path / "memory.json").write_text(json.dumps(content))
    report.write_pages(tmp_path, tmp_path)
    page = (tmp_path / "overlap.md").read_text()
    assert page.startswith("# Table 4 of the trie paper, measured: overlap\n")
    assert "| prompts | 3 beams | 9 beams |\n|---|---|---|\n| code | 0.5 | 0.25 |\n" in page
    assert "(overlap.md)" in (tmp_path / "README.md").read_text()


def test_the_tables_of_the_repository_are_what_its_json_says(tmp_path: Path) -> None:
    assert report.fill_in(report.RESULTS.read_text(), report.MEASURED) == report.RESULTS.read_text()
    report.write_pages(report.MEASURED, tmp_path)
    assert _texts(tmp_path) == _texts(report.PAGES)


def _texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.md")}


@pytest.mark.parametrize(
    ("model", "place"),
    [("the trained target", "."), (get.NAME, report.OF_REAL_MODEL), (whisper.NAME, report.OF_SPEECH)],
)
def test_what_a_run_left_is_taken_over_without_its_series(tmp_path: Path, model: str, place: str) -> None:
    results, kept = tmp_path / "results", tmp_path / "kept"
    results.mkdir()
    kept.mkdir()
    content = {
        "title": "T",
        "note": "measured",
        "columns": ["a", "b"],
        "command": "python -m benchmarks",
        "machine": {"cores": 2, "processor": "P", "vllm": "1", "engine": "E"},
        "setting": {"size": "full", "model": model},
        "cells": [{"cell": [n], "rows": [[n, 0.5]], "series": {"ms": [1.0]}} for n in range(2)],
    }
    (results / "steps.json").write_text(json.dumps(content))
    report.take_over(results, kept)
    taken = json.loads((kept / place / "steps.json").read_text())
    assert taken["cells"] == [{"rows": [[0, 0.5], [1, 0.5]]}]
    assert taken.keys() == content.keys() - {"setting"}


def test_the_picture_shows_a_fork_that_copies_one_tail(tmp_path: Path) -> None:
    _, blocks, copies = picture.search()
    assert copies == [(blocks.row_blocks(2)[-1], blocks.row_blocks(3)[-1])]
    picture.draw(tmp_path / "design.png")
    assert (tmp_path / "design.png").read_bytes().startswith(b"\x89PNG")


def test_runs_take_turns_and_begin_none_once_their_time_is_spent() -> None:
    runs = {"first": lambda: time.sleep(0.02), "second": lambda: None}
    assert {name: len(seconds) for name, seconds in alternate(runs, 3).items()} == {"first": 3, "second": 3}
    assert {name: len(seconds) for name, seconds in alternate(runs, 3, 0.01).items()} == {"first": 1, "second": 1}


def test_dead_blocks_are_held_against_what_can_have_died() -> None:
    # 3 beams, 2 common blocks and a tail each; two boundaries are crossed, and 2 of 3 blocks die at each.
    growing = Steps(used=[2, 5, 8, 11], live=[0, 5, 6, 7], path=[0, 3, 4, 5])
    assert most_dead(growing, 3) == (4, 4)
    # All live again, but each beam has a block of its own from before: it can die without any boundary.
    parted = Steps(used=[5, 8, 8], live=[5, 8, 6], path=[3, 4, 4])
    assert most_dead(parted, 3) == (2, 2)
    assert most_dead(Steps(used=[5, 5], live=[5, 5], path=[3, 3]), 3)[0] == 0
