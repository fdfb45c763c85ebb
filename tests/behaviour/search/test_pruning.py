"""Pruned beams in the engine are those of a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cases import EOS, PRUNINGS, grid_of, num_changed, prompted, run
from tests.support.engine import Engines

pytestmark = pytest.mark.slow


@pytest.mark.nightly
def test_pruned_beams_are_the_loops_and_disturb_nobody(engines: Engines, random_model: Callable[[str], Path]) -> None:
    model = random_model("gqa")
    grid = {"semantics": ["hf", "tridecode"], "early_stopping": [False], "max_tokens": [9]}
    grid |= {"pruning": [*PRUNINGS], "controls": ["none", "top_k", "penalties"], "stop_token_ids": [(), (EOS, 83, 140)]}
    cases = prompted(grid_of(0, **grid, beam_width=[2, 5]), model)
    for name in PRUNINGS.keys() - {"none"}:
        assert num_changed([case for case in cases if case.pruning == name], pruning="none"), name
    run(engines(model), cases)
