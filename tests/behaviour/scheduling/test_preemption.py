"""Whatever takes a group's KV blocks away, and whenever, it goes on where it was and finds the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.support.disturb import preempt_all
from tests.support.engine import Engines, num_used_blocks
from tests.support.reference import transformers_greedy
from tests.support.running import BYTES_PER_BLOCK, MOST_TIES, count_ties, prompt_of, run
from vllm_trie import beam_params

pytestmark = pytest.mark.slow


def test_a_resumed_group_computes_what_its_rows_have_in_common_once(
    engines: Engines, random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(random_model("gqa"), enable_prefix_caching=False, async_scheduling=False)
    runner, computed = engine.runner, []

    def prepare_inputs(scheduler_output: Any, *args: Any) -> Any:
        computed.append(scheduler_output.total_num_scheduled_tokens)
        return type(runner).prepare_inputs(runner, scheduler_output, *args)

    monkeypatch.setattr(runner, "prepare_inputs", prepare_inputs)
    steps = 0

    def preempt_once() -> None:
        nonlocal steps
        steps += 1
        if steps == 30:
            (group,) = engine.scheduler.groups.values()
            preempt_all(engine)
            suffix = group.length - group.num_common
            assert 1 <= suffix < group.length, "nothing is settled; choose another prompt"
            computed[:] = [50 + group.num_common, 6 * suffix, None]

    run(engine, [(prompt_of(50), beam_params(6, max_tokens=60, ignore_eos=True))], preempt_once)
    prefix, suffixes, after = computed[0], computed[1], computed.index(None)
    assert computed[after + 1 : after + 4] == [prefix, suffixes, 6]


@pytest.mark.parametrize(
    ("policy", "caching"), [pytest.param("fcfs", True, marks=pytest.mark.nightly), ("priority", False)]
)
def test_a_pool_too_small_for_all_preempts_some_and_changes_no_answer(
    engines: Engines,
    random_model: Callable[[str], Path],
    policy: str,
    caching: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model("gqa")
    jobs = [(prompt_of(40, w), beam_params(w, n=w, max_tokens=90, ignore_eos=True)) for w in (6, 4, 1, 6, 5)]
    jobs += [(prompt_of(30, seed), SamplingParams(temperature=0, max_tokens=60)) for seed in (7, 8)]
    roomy = run(engines(model), jobs)
    options = {"scheduling_policy": policy, "enable_prefix_caching": caching}
    engine = engines(model, kv_cache_memory_bytes=26 * BYTES_PER_BLOCK, **options)
    num_preempted, num_steps = 0, 0
    preempt = engine.scheduler._preempt_request

    def counting(request: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal num_preempted
        num_preempted += request.request_id in engine.scheduler.groups
        preempt(request, *args, **kwargs)

    monkeypatch.setattr(engine.scheduler, "_preempt_request", counting)

    def count() -> None:
        nonlocal num_steps
        num_steps += 1

    tight = run(engine, jobs, count)
    assert num_preempted > 0, "the pool is not small enough to test anything"
    assert num_steps < 20 * 90, "groups hardly get on"
    assert count_ties(tight, roomy) <= MOST_TIES * sum(params.n for _, params in jobs)
    for (prompt, _), output in zip(jobs[-2:], tight[-2:], strict=True):
        assert [*output.outputs[0].token_ids] == transformers_greedy(model, prompt, 60)


@pytest.mark.parametrize("clear_cache", [False, True])
def test_a_pause_holds_groups_where_they_are(
    engines: Engines, random_model: Callable[[str], Path], clear_cache: bool
) -> None:
    engine = engines(random_model("gqa"))
    jobs = [(prompt_of(40), beam_params(5, n=5, max_tokens=30, ignore_eos=True))]
    expected = run(engine, jobs)
    steps = 0

    def pause() -> None:
        nonlocal steps
        steps += 1
        if steps == 10:
            (group,) = engine.scheduler.groups.values()
            if clear_cache:  # preempts what runs
                engine.core.pause_scheduler("keep", clear_cache=True)
                assert num_used_blocks(engine.scheduler.kv_cache_manager) == 0
            else:
                engine.core.sleep(0, "keep")
            for _ in range(3):  # what is on its way arrives
                engine.llm.llm_engine.step()
            length = group.length
            for _ in range(3):
                engine.llm.llm_engine.step()
            assert group.length == length
            engine.core.resume_scheduler()

    assert count_ties(run(engine, jobs, pause), expected) == 0
    assert steps >= 30


def test_rows_that_compute_their_histories_stay_within_the_budget(
    engines: Engines, random_model: Callable[[str], Path]
) -> None:
    """However little room others leave them meanwhile; the scheduler checks its budget after every step."""
    limits = {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 4}
    engine = engines(random_model("gqa"), long_prefill_token_threshold_adaptive=False, **limits)
    core, params = engine.llm.llm_engine, beam_params(4, n=4, max_tokens=40, sample_first=30, seed=1, ignore_eos=True)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    (expected,) = run(engine, [(prompt_of(4), params.clone())])
    core.add_request("sampled apart", {"prompt_token_ids": prompt_of(4)}, params)
    while not any(group.length == 12 for group in engine.scheduler.groups.values()):
        core.step()
    preempt_all(engine)
    wide = beam_params(50, max_tokens=10, ignore_eos=True)  # fans out while histories of 4 tokens a step are computed
    core.add_request("wide", {"prompt_token_ids": prompt_of(12, 5)}, wide)
    for seed in range(10):
        plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        core.add_request(str(seed), {"prompt_token_ids": prompt_of(3, seed)}, plain)
    finished = {}
    while core.has_unfinished_requests():
        finished.update({output.request_id: output for output in core.step() if output.finished})
    assert count_ties([finished["sampled apart"]], [expected]) == 0


def test_histories_are_computed_in_a_batch_with_long_prompts(
    engines: Engines, random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(random_model("gqa"), max_num_batched_tokens=128, long_prefill_token_threshold=48)
    longs = [(prompt_of(450, seed), SamplingParams(temperature=0, max_tokens=2)) for seed in (1, 2)]
    jobs = [*longs, (prompt_of(20), beam_params(8, n=8, max_tokens=60, ignore_eos=True))]
    steps = 0

    def preempt_the_group_once() -> None:
        nonlocal steps
        steps += 1
        if steps == 25:
            assert len(engine.scheduler.running) == 1
            engine.scheduler._preempt_request(engine.scheduler.running.pop(), time.monotonic())

    outputs = run(engine, jobs[::-1], preempt_the_group_once)
    assert len(outputs[0].outputs) == 8
    assert steps < 80
