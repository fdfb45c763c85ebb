"""What a soak test judges: memory, answers, the log."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.soak import Answer, Soak, error_lines, growth

pytestmark = pytest.mark.slow


def grown(per_minute: float, minutes: int = 60) -> list[tuple[float, int]]:
    """Memory that grows fast for ten minutes, and then by so much of itself."""
    settled = 1_000_000
    return [
        (60.0 * minute, int(settled * (minute / 10 if minute < 10 else 1 + per_minute * (minute - 10))))
        for minute in range(minutes + 1)
    ]


def test_memory_counts_once_it_has_settled() -> None:
    assert growth(grown(0.0), 60) == 0
    assert growth(grown(0.01), 60) == pytest.approx(0.41, abs=0.05)  # between the middles of the first and last sixth


def test_a_short_run_has_settled_at_its_middle() -> None:
    assert growth([(60.0 * minute, 100 if minute < 5 else 200) for minute in range(11)], 10) == 0


@pytest.mark.parametrize(
    ("texts", "logprobs", "outcome"),
    [
        (("a", "b"), (-1.0, -2.0), "the same"),
        (("b", "a"), (-2.0, -1.0001), "near-ties"),
        (("a", "c"), (-1.0, -2.5), "wrong"),
        (("a",), (-1.0,), "wrong"),
    ],
)
def test_answers_are_compared(texts: tuple[str, ...], logprobs: tuple[float, ...], outcome: str) -> None:
    server: Any = SimpleNamespace()
    soak = Soak(server, random.Random(0))
    soak.expected["4 beams", "x"].append(Answer(("a", "b"), (-1.0, -2.0)))
    assert soak.judged("4 beams", "x", Answer(texts, logprobs)) == outcome
    assert len(soak.wrong) == (outcome == "wrong")
    assert soak.judged("sampled", "x", Answer(texts, logprobs)) == "answered"


def test_a_log_is_searched_for_errors() -> None:
    well = "INFO 11-22 10:00:00 [core.py:1] no error here\nWARNING 11-22 10:00:01 slow"
    assert error_lines(well) == []
    assert len(error_lines(f"{well}\nERROR 11-22 [core.py:2] x\nTraceback (most recent call last):")) == 2
