"""What a model writes is judged as its task asks, in a process that can do no harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sandbox
from benchmarks.__main__ import main
from benchmarks.metrics import boxed, exact_match, number_of, rouge_l
from benchmarks.sandbox import succeeds, which_succeed
from benchmarks.tables.tasks import (
    comparison_cells,
    discordant,
    first_lines_match,
    functions_pass,
    mcnemar,
    problems_are_solved,
    summaries,
    sums_are_right,
)
from tests.support.engine import Engines

pytestmark = pytest.mark.slow

HARMLESS = ["print(sum(range(10)))", "with open('here', 'w') as file:\n    file.write('x')", "import math, re, json"]
HARMFUL = {
    "fails": "assert 1 == 2",
    "is no Python": "def",
    "exits with an error": "raise SystemExit(3)",
    "never ends": "while True:\n    pass",
    "takes all memory": "x = bytearray(1 << 34)",
    "listens": "import socket\nsocket.socket().bind(('127.0.0.1', 0))",
    "starts a process": "import subprocess\nsubprocess.run(['true'])",
    "asks the shell": "import os\nassert os.system('true') == 0",
    "forks": "import os\nos.fork()",
    "writes elsewhere": "open('/tmp/elsewhere', 'w')",
    "removes files": "import os\nopen('here', 'w').close()\nos.remove('here')",
}


@pytest.mark.parametrize("program", HARMLESS)
def test_a_harmless_program_succeeds(program: str) -> None:
    assert succeeds(program)


@pytest.mark.parametrize("program", HARMFUL.values(), ids=HARMFUL)
def test_a_program_that_fails_or_harms_does_not(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "GUARD", sandbox.GUARD.replace(f"({sandbox.CPU_SECONDS}, ", "(1, "))
    assert not succeeds(program)


def test_each_program_is_judged_for_itself() -> None:
    assert which_succeed(["pass", "1 / 0", "pass"]) == [True, False, True]


def test_a_function_must_pass_the_tests_of_its_task() -> None:
    task = {"prompt": "def twice(x):\n", "test": "def check(f):\n    assert f(2) == 4\n", "entry_point": "twice"}
    assert functions_pass([task] * 3, ["    return 2 * x\n", "    return x + 3\n", "    return"]) == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("It is 3 + 4 = 7.\n#### 7", 7),
        ("#### 1,234 apples of 9", 1234),
        ("He has 3, then -2.50 dollars", -2.5),
        ("#### none", None),
        ("nothing", None),
    ],
)
def test_the_number_of_an_answer(answer: str, number: float | None) -> None:
    assert number_of(answer) == number


def test_an_answer_without_a_number_is_wrong() -> None:
    tasks = [{"answer": "so\n#### 7"}] * 3
    assert sums_are_right(tasks, ["7", "#### 7.0", "seven"]) == [True, True, False]


def test_mcnemars_test_counts_what_one_search_alone_solves() -> None:
    ours, greedy = [True, True, True, False, True], [False, False, True, True, False]
    assert discordant(ours, greedy) == (3, 1)
    assert mcnemar(3, 1) == pytest.approx(2 * (1 + 4) / 2**4)
    assert mcnemar(0, 0) == 1
    assert mcnemar(8, 0) == pytest.approx(2 / 2**8)
    assert comparison_cells(ours, greedy, is_greedy=False) == ("80.0 (37.6–96.4)", 5, 3, 1, "0.625")
    assert comparison_cells(greedy, greedy, is_greedy=True)[1:] == (5, "", "", "")


def test_scores_that_are_no_yes_or_no_have_students_interval_and_the_sign_test() -> None:
    ours, greedy = [0.5, 0.25, 0.75, 0.5], [0.25, 0.25, 0.5, 0.75]
    assert discordant(ours, greedy) == (2, 1)
    # mean 0.5, standard error 0.2041 / 2, t(0.975, 3) = 3.1824
    assert comparison_cells(ours, greedy, is_greedy=False) == ("50.0 (17.5–82.5)", 4, 2, 1, "1.000")


@pytest.mark.parametrize(
    ("answer", "matches"),
    [("The Eiffel Tower.", 1), ("eiffel   tower", 1), ("Tower", 0), ("", 0), ("an Eiffel-Tower", 0), ("Paris!", 1)],
)
def test_an_exact_match_minds_no_case_punctuation_articles_or_spaces(answer: str, matches: int) -> None:
    assert exact_match(answer, ["Eiffel Tower", "Paris"]) == matches


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("The cat sat on the mat.", 1.0),
        ("the CAT, sat: on the mat", 1.0),
        ("the cat on mat", 2 * 4 / (4 + 6)),  # 4 common words, in order
        ("mat the on sat cat the", 2 * 3 / (6 + 6)),  # the, on, the
        ("dogs bark", 0.0),
        ("", 0.0),
    ],
)
def test_rouge_l_is_the_f1_of_the_longest_common_subsequence(answer: str, score: float) -> None:
    assert rouge_l(answer, "The cat sat on the mat") == pytest.approx(score)
    assert rouge_l("The cat sat on the mat", answer) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{3} and then \boxed{ x + 1 }", "x+1"),
        (r"\boxed{3", None),
        ("3}", None),
        ("", None),
    ],
)
def test_what_is_in_the_last_box(answer: str, found: str | None) -> None:
    assert boxed(answer) == found


HIGHLIGHTS = "A storm closed the port ."
SETS: dict[str, dict[str, Any]] = {  # one task of each kind
    "functions": {
        "prompt": "def twice(x):\n    ",
        "test": "def check(f):\n    assert f(2) == 4\n",
        "entry_point": "twice",
    },
    "sums": {"question": "What is 3 and 4?", "answer": "3 + 4 = 7\n#### 7"},
    "problems": {"problem": "Halve 1.", "answer": r"\frac{1}{2}"},
    "reading": {"context": "Anna lives in Rome.", "question": "Where?", "answers": {"text": ["Rome", "in Rome"]}},
    "articles": {"article": "The port was closed. " * 400, "highlights": HIGHLIGHTS},
}
METRICS = {
    "functions": "pass@1",
    "sums": "exact match",
    "problems": "exact match",
    "reading": "exact match",
    "articles": "ROUGE-L",
}


def test_answers_are_judged_as_their_sets_are() -> None:
    assert problems_are_solved([SETS["problems"]] * 2, [r"It is \boxed{ \frac{1}{2} }", "1/2"]) == [True, False]
    assert first_lines_match([SETS["reading"]] * 3, ["rome.\nShe", "Rome, Italy", "\n"]) == [1, 0, 0]
    assert summaries([SETS["articles"]] * 2, ["A storm closed the port.", "Dogs."]) == [1, 0]


@pytest.mark.nightly
def test_every_kind_of_task_is_measured_behind_the_option(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.close()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    files = []
    for name, task in SETS.items():
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text(f"{json.dumps(task)}\n" * 2)
    fields = [next(iter(task)) for task in SETS.values()]
    options = ["--size", "minimal", "--only", "tasks", "--out", str(tmp_path), "--max-tokens", "4"]
    assert main([*options, "--prompts", *map(str, files), "--field", *fields]) == 0
    content = json.loads((tmp_path / "tasks.json").read_text())
    rows = [dict(zip(content["columns"], row, strict=True)) for cell in content["cells"] for row in cell["rows"]]
    assert {row["set"]: row["metric"] for row in rows} == METRICS
    assert {(row["search"], row["of"]) for row in rows} == {
        (search, 2) for search in ("greedy", "4 beams", "8 beams", "beam sampling, 4")
    }
