"""Two errors of the DSBD paper: docs/speculation.md tells of them by example, and its numbers are found here."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.engine import ROOT
from tests.support.exhaustive import Branches, branches, distance
from vllm_trie.speculation.search.rejection import AcceptedLayer, DraftRejectionResidual, accept_drafts

PAGE = (ROOT / "docs" / "speculation.md").read_text()
SECTION = PAGE.partition("## Two errors of the DSBD paper\n")[2].partition("\n## ")[0]
Kept = Callable[[np.ndarray], np.ndarray]


def column(table: str, heading: str) -> torch.Tensor:
    """[cells] float64, the numbers below a heading, in the table that has `table` as its first one."""
    lines = re.search(rf"^\| {table} \|.*\n(?:\|.*\n)+", SECTION, re.MULTILINE)
    assert lines is not None
    headings, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines())
    return torch.tensor([float(row[headings.index(heading)]) for row in rows], dtype=torch.float64)


def everything(drafts: np.ndarray) -> np.ndarray:
    return drafts


def distribution_of_one_beam(
    p: torch.Tensor, q: torch.Tensor, num_drafts: int, tested: torch.Tensor | None = None, kept: Kept = everything
) -> np.ndarray:
    """[cells], what a layer of one beam becomes, sampled with replacement.

    Args:
        p, q: [cells].
        tested: What drafts are verified against, if not what they are sampled from.
        kept: Which of them are verified.
    """
    tested = q if tested is None else tested
    found = np.zeros(len(p))

    def run(rng: Branches) -> AcceptedLayer:
        return accept_drafts(p[None], tested[None], kept(rng.drafts(q, num_drafts, True)), 1, True, rng)

    for rng, verified in branches(run, 1):
        if rng.last is None:
            found[verified.cells[0]] += rng.probability
        else:
            found += rng.probability * rng.last
    return found


@pytest.fixture
def inverted(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = DraftRejectionResidual.chance
    monkeypatch.setattr(DraftRejectionResidual, "chance", lambda self, draft: 1 / max(chance(self, draft), 1e-300))


def test_by_the_right_ratio_a_layer_follows_the_target() -> None:
    p, q = column("token", "p"), column("token", "q")
    for num_drafts in (1, 4):
        found = distribution_of_one_beam(p, q, num_drafts)
        assert found == pytest.approx(column("token", "min(1, p/q)").numpy(), abs=1e-9)


@pytest.mark.usefixtures("inverted")
def test_by_the_printed_ratio_a_layer_follows_the_draft_model() -> None:
    p, q = column("token", "p"), column("token", "q")
    found = distribution_of_one_beam(p, q, 1)
    assert found == pytest.approx(column("token", "min(1, q/p)").numpy(), abs=1e-9)
    assert found == pytest.approx(q.numpy(), abs=1e-9)
    assert [round(distance(distribution_of_one_beam(p, q, n), p.numpy()), 3) for n in (1, 4)] == [0.3, 0.414]
    assert "This is 0.3 off, in total variation. With four drafts it is 0.414." in " ".join(SECTION.split())


def test_what_becomes_of_orphans_decides_whether_a_layer_follows_the_target() -> None:
    p, q = column("continuation", "p"), column("continuation", "q")
    is_valid = p > 0
    renormalised = q * is_valid / (q * is_valid).sum()

    def without_orphans(drafts: np.ndarray) -> np.ndarray:
        return drafts[is_valid.numpy()[drafts]]

    ways = {
        "orphans rejected (here)": {},
        "orphans dropped (Algorithm 1)": {"kept": without_orphans},
        "dropped, q renormalised": {"kept": without_orphans, "tested": renormalised},
    }
    for heading, how in ways.items():
        found = distribution_of_one_beam(p, q, 1, **how)
        assert found == pytest.approx(column("continuation", heading).numpy(), abs=1e-9), heading
    off = [distance(distribution_of_one_beam(p, q, n, kept=without_orphans), p.numpy()) for n in (1, 4)]
    assert off == pytest.approx([0.0875, 0.1162], abs=1e-4)
    assert "This is 0.0875 off, and more drafts make it worse: 0.116 with four." in SECTION
    for num_drafts in (1, 4):
        for how in ({}, ways["dropped, q renormalised"]):
            assert distance(distribution_of_one_beam(p, q, num_drafts, **how), p.numpy()) < 1e-9
        assert distance(distribution_of_one_beam(p, q, num_drafts, renormalised), p.numpy()) > 0.1
