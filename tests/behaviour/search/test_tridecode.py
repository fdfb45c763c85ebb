"""semantics="tridecode" in the engine is the plain loop, with everything else that acts on hypotheses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cases import COMMA, DOT, EOS, Case, grid_of, num_changed, prompted, run
from tests.support.engine import TRAINED_TARGET, Engines

pytestmark = pytest.mark.slow

TRIDECODE = {"semantics": ["tridecode"], "early_stopping": [False]}


def test_beams_are_the_loops_and_disturb_nobody(engines: Engines, random_model: Callable[[str], Path]) -> None:
    stops = [(), (EOS,), (EOS, 83, 140, 248)]
    cases = grid_of(0, **TRIDECODE, controls=["none", "penalties", "bias", "top_k", "harsh bans"], stop_token_ids=stops)
    cases = prompted(cases, random_model("gqa"))
    assert num_changed(cases, semantics="hf") > 3
    run(engines(random_model("gqa")), cases)


@pytest.mark.nightly
def test_stop_strings_of_the_trained_model_are_the_loops(engines: Engines) -> None:
    strings = [(), ("):\n",), ("self.", "f(x", "t(s"), ("\n", "e(", "return", ", ")]
    tokens = {"stop_token_ids": [(), (COMMA, DOT)], "ignore_eos": [False, True]}
    cases = prompted([*grid_of(0, **TRIDECODE, stop=strings, **tokens), Case(8, "tridecode", max_tokens=1)])
    assert num_changed(cases, semantics="hf") > 3
    run(engines(TRAINED_TARGET), cases)
