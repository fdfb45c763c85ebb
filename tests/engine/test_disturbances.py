"""Under async scheduling, whatever takes rows away while steps are on their way, the answers stay what they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.conftest import Engine, Engines
from tests.engine.test_preemption import count_ties
from tests.engine.test_scheduling import prompt_of
from vllm_trie import beam_params

MAX_TOKENS = 8
PROMPT = 29  # a few tokens before a block boundary
ASKED: list[dict[str, Any]] = [
    {"ignore_eos": True},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"min_tokens": 6, "stop_token_ids": [13, 15], "logprobs": 2},
    {"temperature": 1.7, "min_p": 0.02, "top_k": 12, "logit_bias": {30: 2.0}},
    {"semantics": "vllm", "length_penalty": 2.0},
    {"sample_first": 3, "seed": 5},
    {"do_sample": True, "seed": 3},
]


def jobs() -> list[tuple[list[int], SamplingParams]]:
    searches = [beam_params(3, n=3, max_tokens=MAX_TOKENS, **asked) for asked in ASKED]
    ordinary = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    return [(prompt_of(PROMPT + at), params) for at, params in enumerate([*searches, ordinary])]


@pytest.fixture
def engine(engines: Engines, random_model: Callable[[str], Path]) -> Engine:
    return engines(random_model("gqa"), max_model_len=128, max_num_batched_tokens=64, async_scheduling=True)


def run(engine: Engine, after_step: Callable[[int], None]) -> list[Any]:
    """All answers, in order; None of requests that were aborted. `after_step` gets the step's number."""
    core, finished, number = engine.llm.llm_engine, {}, 0
    for request_id, (prompt, params) in enumerate(jobs()):
        params.output_kind = RequestOutputKind.FINAL_ONLY
        core.add_request(str(request_id), {"prompt_token_ids": prompt}, params)
    while core.has_unfinished_requests():
        finished.update({int(output.request_id): output for output in core.step()})
        number += 1
        after_step(number)
    return [finished.get(request_id) for request_id in range(len(jobs()))]


@pytest.fixture(scope="module")
def undisturbed(_engines: Engines, random_model: Callable[[str], Path]) -> list[Any]:
    engine = _engines(random_model("gqa"), max_model_len=128, max_num_batched_tokens=64, async_scheduling=False)
    return run(engine, lambda _: None)


def test_async_steps_answer_as_synchronous_ones(
    undisturbed: list[Any], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.watched.restart()
    assert count_ties(run(engine, lambda _: None), undisturbed) == 0
    assert engine.watched.most_pending == 2
    assert engine.watched.num_compared >= 3 * (MAX_TOKENS - 1) * 4


def test_preemption_with_steps_on_their_way(
    undisturbed: list[Any], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, seen, preempted_with = engine.scheduler, dict[str, int](), list[int]()
    engine.watched.restart()

    def preempt_whenever_a_search_is_further(_: int) -> None:
        lengths = {group_id: group.length for group_id, group in scheduler.groups.items()}
        if any(length > seen.get(group_id, 0) for group_id, length in lengths.items()):
            preempted_with.extend(group.num_pending for group in scheduler.groups.values())
            while scheduler.running:
                scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
            seen.update(lengths)

    assert count_ties(run(engine, preempt_whenever_a_search_is_further), undisturbed) == 0
    assert any(preempted_with), "nothing was on its way"
    assert engine.watched.num_compared


def test_a_reset_with_steps_on_their_way(undisturbed: list[Any], engine: Engine) -> None:
    resets = []

    def reset(number: int) -> None:
        if number % 4 == 0 and engine.scheduler.groups:
            resets.append(max(group.num_pending for group in engine.scheduler.groups.values()))
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    assert count_ties(run(engine, reset), undisturbed) == 0
    assert len(resets) > 2
    assert any(resets)


def test_aborts_with_steps_on_their_way(undisturbed: list[Any], engine: Engine) -> None:
    core, aborted = engine.llm.llm_engine, [0, 3]

    def abort(number: int) -> None:
        if number == 6:
            assert any(group.num_pending for group in engine.scheduler.groups.values())
            core.abort_request([str(request_id) for request_id in aborted])

    answers = run(engine, abort)
    assert [at for at, answer in enumerate(answers) if answer is None] == aborted
    others = [at for at in range(len(answers)) if at not in aborted]
    assert count_ties([answers[at] for at in others], [undisturbed[at] for at in others]) == 0
