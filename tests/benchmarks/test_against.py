"""Two checkouts are compared from their starts to the table and the file, on the smallest cases there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.against import __main__ as against
from benchmarks.against import cases
from benchmarks.against.sides import ROOT, Side

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a commit to compare with")
def test_a_commit_is_compared_with_this_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cases, "BEAMS", ((2, 1, 8), (2, 2, 8)))
    monkeypatch.setattr(cases, "HOST_BEAMS", ((2, 1, 8),))
    out = tmp_path / "against.json"
    against.main(["HEAD", "--only", "beams,host", "--repeats", "1", "--seconds", "0", "--out", str(out)])
    measured = json.loads(out.read_text())
    assert [case["case"] for case in measured["beams"]] == ["1 x 2 beams", "2 x 2 beams"]
    assert [case["case"] for case in measured["host"]] == ["1 x 2 beams"]
    for case in [*measured["beams"], *measured["host"]]:
        assert case["same_answers"]
        for clock in ("wall", "cpu"):
            assert all(ms > 0 for (ms,) in case["ms"][clock].values())
            assert set(case["ratios"][clock]) == {"older, again", "newer"}
    assert "geometric mean" in capsys.readouterr().out


def test_a_side_that_cannot_start_tells_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"(?s)older ended:.*{tmp_path}"):
        Side("older", ROOT, str(tmp_path), None)


def test_a_section_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        against.main(["HEAD", "--only", "beams,waves"])
    assert (
        "no section waves; there are beams, host, answers, ordinary, paper, catalogs, grammars, dsbd"
        in capsys.readouterr().err
    )
