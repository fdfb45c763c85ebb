"""What a comparison of decisions sees, and what it says."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest

from tests.golden.decisions import Record, Rows, Steps, differences

LAST = 3


def record() -> Record:
    """Of one search of three steps and two beams."""
    steps: Steps = {
        number: (
            Rows.of([0, 1], [5 + number, 9], [-0.1 * number, -np.inf if number == 2 else -7.25]),
            Rows.of([1], [1], [-2.5 * number], [-1.25]) if number == LAST else Rows.none(),
        )
        for number in range(1, LAST + 1)
    }
    answers = {"search": [{"outputs": [{"text": "x", "logprob": -0.1}]}], "ordinary": [{"outputs": [{"text": "y"}]}]}
    return Record({"search": steps}, answers, firm=["search"], logprob_bits=7)


def found(kind: int, field: str, slot: int, change: int) -> Record:
    """A record of which one number of the last step differs."""
    changed = record()
    getattr(changed.steps["search"][LAST][kind], field)[slot] += change
    return changed


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record().save(tmp_path / "some.npz")
    again = Record.load(tmp_path / "some.npz")
    assert not [*differences(record(), again)]
    assert (again.firm, again.logprob_bits, again.num_steps) == (["search"], 7, LAST)


@pytest.mark.parametrize(
    ("kind", "field", "slot", "change", "said"),
    [
        (0, "parents", 1, -1, "beam 1, parent: 1 recorded, 0 found"),
        (0, "tokens", 0, 4, "beam 0, token: 8 recorded, 12 found"),
        (0, "scores", 1, 1, "beam 1, score: -7.25 recorded, -7.25000048 found"),
        (1, "parents", 0, -1, "finished hypothesis 0, parent: 1 recorded, 0 found"),
        (1, "scores", 0, -1, "finished hypothesis 0, score: -7.5 recorded, -7.49999952 found"),
        (1, "ranks", 0, 1, "finished hypothesis 0, what it competes by: -1.25 recorded, -1.25000012 found"),
    ],
)
def test_one_bit_is_a_difference(kind: int, field: str, slot: int, change: int, said: str) -> None:
    assert [*differences(record(), found(kind, field, slot, change))] == [f"'search', step {LAST}, {said}"]


def test_a_step_that_is_there_once_is_a_difference() -> None:
    shorter = record()
    del shorter.steps["search"][LAST]
    assert [*differences(record(), shorter)] == [f"'search', step {LAST}: recorded alone"]
    assert [*differences(shorter, record())] == [f"'search', step {LAST}: found alone"]
    none = record()
    none.steps.clear()
    assert [*differences(record(), none)] == ["'search', step 1: recorded alone"]


def test_a_hypothesis_more_is_a_difference() -> None:
    more = record()
    steps = more.steps["search"]
    steps[2] = steps[2][0], steps[LAST][1]
    assert [*differences(record(), more)] == ["'search', step 2, finished hypothesis count: 0 recorded, 1 found"]


def test_one_bit_of_an_answer_is_a_difference() -> None:
    other = copy.deepcopy(record())
    other.answers["search"][0]["outputs"][0]["logprob"] = -0.1 - 2**-55
    assert [*differences(record(), other)] == [
        "'search', its answer, 0, outputs, 0, logprob: -0.1 recorded, -0.10000000000000003 found"
    ]
    del other.answers["search"], other.answers["ordinary"]
    assert len([*differences(record(), other)]) == 2


def test_where_torch_rounds_differently_firm_searches_decide_the_same() -> None:
    def elsewhere(other: Record) -> list[str]:
        other.logprob_bits += 1
        return [*differences(record(), other)]

    assert not elsewhere(found(0, "scores", 1, 1))
    assert elsewhere(found(0, "scores", 1, 1 << 12))
    assert elsewhere(found(0, "tokens", 1, 1))
    other = record()
    other.answers.clear()
    assert not elsewhere(other), "answers have the bits of scores"
