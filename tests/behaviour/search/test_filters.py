"""Temperature and filters act on every beam in the engine as in a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cases import EOS, WARPINGS, Case, grid_of, num_changed, prompted, run
from tests.support.engine import TRAINED_TARGET, Engine, Engines
from tests.support.running import prompt_of
from vllm_trie import beam_params

pytestmark = pytest.mark.slow


@pytest.fixture
def model(random_model: Callable[[str], Path]) -> Path:
    return random_model("gqa")


@pytest.mark.nightly
def test_filtered_beams_are_the_loops_and_disturb_nobody(engines: Engines, model: Path) -> None:
    cases = grid_of(0, semantics=["hf"], controls=["none", *WARPINGS], stop_token_ids=[(), (EOS,), (EOS, 83, 140)])
    cases = prompted(cases, model)
    for name in WARPINGS:
        assert num_changed([case for case in cases if case.controls == name], controls="none"), name
    run(engines(model), cases)


def test_where_filters_leave_fewer_hypotheses_the_others_come_back_empty(engines: Engines, model: Path) -> None:
    some = [Case(5, controls="the best alone"), Case(5, controls="the best alone", max_tokens=1, logprobs=2)]
    some += [Case(5, controls="top_k", max_tokens=1), Case(5, controls="top_k", max_tokens=2)]
    cases = prompted(some, model)
    assert [len(case.found()) for case in cases] == [1, 1, 3, 5]
    run(engines(model), cases)


def test_one_beam_whose_rows_may_take_the_best_alone_is_greedy_search(engines: Engines) -> None:
    case = Case(1, controls="the best alone", stop=("):\n",), min_tokens=7, ignore_eos=False)
    assert prompted([case])[0].found() == prompted([Case(1, stop=("):\n",), min_tokens=7, ignore_eos=False)])[0].found()
    run(engines(TRAINED_TARGET), prompted([case]))


def test_temperature_zero_neither_scales_nor_filters(engines: Engines, model: Path) -> None:
    engine: Engine = engines(model)
    plain, cold = (beam_params(4, max_tokens=12, **fields) for fields in ({}, {"temperature": 0.0, "top_k": 1}))
    one, other = (engine.generate([prompt_of(20)], params)[0].outputs[0] for params in (plain, cold))
    assert one.token_ids == other.token_ids
    assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob)
