"""docs/models.md says what benchmarks/architectures/measured.json holds."""

from __future__ import annotations

from benchmarks.architectures.compare import Hypothesis, compared
from benchmarks.architectures.formats import FORMATS
from benchmarks.architectures.models import BY_NAME
from benchmarks.architectures.table import DOCUMENT, document, read, verdict

FEWEST = 60
FEWEST_WITH_SPECULATION = 40
FORCED_TOLERANCE = 2e-5


def test_the_page_is_what_the_measured_rows_make() -> None:
    assert DOCUMENT.read_text() == document(read()), "run python -m benchmarks.architectures --table"


def test_enough_architectures_are_measured_and_beams_are_wrong_on_none() -> None:
    rows = read()["architectures"]
    verdicts = [verdict(row) for row in rows]
    assert {row["name"] for row in rows} <= BY_NAME.keys()
    assert len(rows) >= FEWEST
    assert not {"differs", "no answer", "failed"} & {*verdicts}


def test_speculation_changes_no_answer_on_any_architecture() -> None:
    found = [row["speculation"] for row in read()["architectures"] if row["outcome"] == "compared"]
    compared = [one for one in found if one["outcome"] == "compared"]
    assert len(compared) >= FEWEST_WITH_SPECULATION
    assert all(one["equal"] + one["tied"] == one["hypotheses"] for one in compared)
    others = {one.get("error", one["outcome"]) for one in found if one["outcome"] != "compared"}
    assert all(other == "plain steps" or "recurrent states" in other for other in others)


def test_beams_in_every_number_format_are_those_of_vllms_own_loop() -> None:
    rows = read()["formats"]
    assert [row["name"] for row in rows] == [one.name for one in FORMATS]
    assert {*map(verdict, rows)} == {"equal"}
    assert max(row["forced"] for row in rows) < FORCED_TOLERANCE


def test_only_near_ties_may_come_in_another_order() -> None:
    ours, near, far = (Hypothesis([3, token], score) for token, score in ((4, -1.0), (5, -1.000001), (6, -1.1)))
    assert compared([([ours], [ours])])[:2] == (1, 0)
    assert compared([([ours], [near])])[:2] == (0, 1)
    assert compared([([ours], [far])])[:2] == (0, 0)
