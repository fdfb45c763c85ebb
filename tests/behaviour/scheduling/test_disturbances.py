"""Whatever takes rows and KV blocks away from searches, and whenever, they go on where they were, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.disturb import AbortWithin, Clumsy, pending
from tests.support.engine import Engine, Engines
from tests.support.modes import (
    MODES,
    PLAIN,
    SWEEP,
    Mode,
)
from tests.support.pairs import Pair
from tests.support.reference import SCORE_TOLERANCE
from tests.support.running import MOST_TIES, count_ties, run
from tests.support.traces import check_trace
from tests.support.trained_pair import own_sum

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=SWEEP)
def mode(request: pytest.FixtureRequest) -> Mode:
    return request.param


@pytest.fixture(scope="module")
def found_in_sync(_engines: Engines, random_pair: Callable[[str, float], Pair]) -> list[Any]:
    return run(MODES["sync"].start(_engines, random_pair), MODES["sync"].jobs())


@pytest.fixture(scope="module")
def undisturbed(
    mode: Mode, request: pytest.FixtureRequest, _engines: Engines, random_pair: Callable[[str, float], Pair]
) -> list[Any]:
    """What is found in the mode; under "async", what steps find of which each waits for the one before."""
    if mode.asked is PLAIN:
        return request.getfixturevalue("found_in_sync")
    return run(mode.start(_engines, random_pair), mode.jobs())


@pytest.fixture
def engine(mode: Mode, undisturbed: list[Any], engines: Engines, random_pair: Callable[[str, float], Pair]) -> Engine:
    engine = mode.start(engines, random_pair)
    engine.watched.restart()
    return engine


def check(mode: Mode, found: list[Any], expected: list[Any]) -> None:
    """Raise AssertionError unless all is found that was, or, where it is sampled anew, has the target's probability."""
    if not mode.draws_anew:
        assert count_ties(found, expected) <= MOST_TIES * sum(len(output.outputs) for output in expected)
        return
    for output, other in zip(found, expected, strict=True):
        assert len(output.outputs) == len(other.outputs)
        for hypothesis in output.outputs:
            if hypothesis.cumulative_logprob is not None and len(output.outputs) > 1:
                tokens = tuple(hypothesis.token_ids)
                sums = own_sum(output.prompt_token_ids, tokens)
                assert hypothesis.cumulative_logprob == pytest.approx(sums, abs=SCORE_TOLERANCE * len(tokens))


def test_searches_that_overlap_or_whose_prompts_are_cached_find_the_same(
    mode: Mode, undisturbed: list[Any], engine: Engine
) -> None:
    found = run(engine, mode.jobs(trace=True))
    check(mode, found, undisturbed)
    traces = list(map(check_trace, found[:-1]))
    assert any(trace.forests for trace in traces) == mode.speculates
    assert engine.watched.num_compared > 0
    assert engine.watched.most_pending == 1 + mode.overlaps


def test_groups_preempted_whenever_they_are_further_go_on_where_they_were(
    mode: Mode, undisturbed: list[Any], engine: Engine
) -> None:
    clumsy, jobs = Clumsy(engine), mode.jobs(trace=True)
    found = run(engine, jobs, clumsy.preempt_whenever_a_search_is_further)
    check(mode, found, undisturbed)
    for output in found[:-1]:
        check_trace(output)
    longest = max(params.max_tokens for _, params in jobs)
    assert clumsy.num_preempted >= (longest - 1) / (1 + mode.num_layers)
    assert clumsy.num_steps < 16 * longest, "preempted groups hardly get on"
    assert clumsy.most_pending or not mode.overlaps, "nothing was on its way"


def test_resets_of_the_prefix_cache_change_no_answer(mode: Mode, undisturbed: list[Any], engine: Engine) -> None:
    num_steps, on_their_way = 0, []

    def reset() -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps % 4 == 0 and engine.scheduler.groups:
            on_their_way.append(pending(engine))
            assert engine.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)

    check(mode, run(engine, mode.jobs(), reset), undisturbed)
    assert len(on_their_way) > 1
    assert any(on_their_way) or not mode.overlaps


def test_aborts_between_and_within_steps_leave_nothing_and_disturb_nobody(
    mode: Mode, undisturbed: list[Any], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, core = mode.jobs(), engine.llm.llm_engine
    within, aborted = AbortWithin(engine, monkeypatch, "1", 3), {0: 2, 1: 3}  # in which step

    def abort() -> None:
        if within.num_steps == aborted[0]:
            core.abort_request(["0"])

    found = run(engine, jobs, abort)
    assert [at for at, answer in enumerate(found) if answer is None] == [*aborted]
    check(mode, found[len(aborted) :], undisturbed[len(aborted) :])
    core.step()  # tells the worker
    assert not engine.runner.groups
    assert not engine.runner.req_states.req_id_to_index
