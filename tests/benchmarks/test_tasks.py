"""What a model writes is judged as its task asks, in a process that can do no harm."""

from __future__ import annotations

import pytest

from benchmarks import sandbox
from benchmarks.sandbox import succeeds, which_succeed
from benchmarks.tables.tasks import discordant, functions_pass, mcnemar, number_of, sums_are_right, told

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
    assert told(ours, greedy, is_greedy=False)[:2] == (4, 5)
    assert told(ours, greedy, is_greedy=False)[3:5] == (3, 1)
