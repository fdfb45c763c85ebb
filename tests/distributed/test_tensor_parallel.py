"""Two ranks, processes or Ray's actors, find what one finds: tokens, scores, order, the reasons why hypotheses end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

from vllm import SamplingParams
from vllm.v1.executor.ray_executor import RayDistributedExecutor
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

from tests import models
from tests.conftest import BLOCK_SIZE, Engine, Engines
from tests.distributed.engines import RANKS, ParallelEngine
from tests.distributed.ray_on_cpu import local_ray
from tests.engine.disturb import preempt_all
from tests.engine.options import DRAWN, WITHOUT_TEXT
from tests.engine.pairs import NOISE, steps_per_forward
from tests.engine.running import MOST_TIES, count_ties, prompt_of, run
from vllm_trie import beam_params

Job = tuple[list[int], SamplingParams]
MAX_TOKENS = BLOCK_SIZE + 9
MAX_BATCHED = 256  # tokens of a step


def jobs() -> list[Job]:
    """Groups of several widths, with and without EOS, on both sides of a block boundary, and ordinary ones beside."""
    asked = []
    for number, length in enumerate([1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 20]):
        for width, ignore_eos in ((2, True), (5, False)):
            params = beam_params(width, n=width, max_tokens=MAX_TOKENS, ignore_eos=ignore_eos)
            asked.append((prompt_of(length, number), params))
        greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=2)
        asked.append((prompt_of(length, number), greedy))
    for number, options in enumerate([*WITHOUT_TEXT, *DRAWN]):
        params = beam_params(**{"beam_width": 5, "n": 5, "max_tokens": 14} | options)
        asked.append((prompt_of(20 + number % 9, 100 + number), params))
    return asked


def copied(asked: list[Job]) -> list[Job]:
    return [(prompt, params.clone()) for prompt, params in asked]


@pytest.fixture(scope="module")
def model(random_model: Callable[[str], Path]) -> Path:
    return random_model("gqa")


@pytest.fixture(scope="module")
def parallel(model: Path) -> Iterator[ParallelEngine]:
    engine = ParallelEngine(model, max_num_batched_tokens=MAX_BATCHED)
    yield engine
    engine.check_nothing_is_left()
    engine.close()


@pytest.fixture(scope="module")
def found_by_processes(parallel: ParallelEngine) -> list[Any]:
    """What two ranks, each a process, find when nothing disturbs them."""
    return run(parallel, jobs())


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray(num_devices=2 * RANKS):  # an engine that is gone still has those it reserved
        yield


def check_same(outputs: list[Any], expected: list[Any]) -> None:
    assert count_ties(outputs, expected) <= MOST_TIES * sum(len(output.outputs) for output in expected)


def test_two_ranks_find_what_one_finds(
    engines: Engines, model: Path, parallel: ParallelEngine, found_by_processes: list[Any]
) -> None:
    expected = run(engines(model, max_num_batched_tokens=MAX_BATCHED), jobs())
    stops = [hypothesis.finish_reason for output in expected for hypothesis in output.outputs]
    assert {"stop", "length"} <= {*stops}
    check_same(found_by_processes, expected)


# The second is vLLM's older executor, which Ray hands arrays in memory that it would like to have back.
@pytest.mark.parametrize(
    ("backend", "kind"), [("ray", RayExecutorV2), (RayDistributedExecutor, RayDistributedExecutor)]
)
def test_ray_finds_what_processes_find(
    cluster: None, model: Path, found_by_processes: list[Any], backend: Any, kind: type
) -> None:
    limits = {"max_num_batched_tokens": MAX_BATCHED, "async_scheduling": False}
    engine = ParallelEngine(model, distributed_executor_backend=backend, **limits)
    try:
        assert type(engine.core.model_executor) is kind
        check_same(run(engine, jobs()), found_by_processes)
        engine.check_nothing_is_left()
    finally:
        engine.close()


def test_a_preempted_group_goes_on_alike_on_all_ranks(parallel: ParallelEngine, found_by_processes: list[Any]) -> None:
    steps, preempted = 0, list[str]()

    def now_and_then() -> None:
        nonlocal steps
        steps += 1
        if steps % 11 == 0:
            preempted.extend(request.request_id for request in parallel.scheduler.running if is_decoding(request))
            preempt_all(parallel)

    def is_decoding(request: Any) -> bool:
        group = parallel.scheduler.groups.get(request.request_id)
        return group is not None and group.length > 1

    check_same(run(parallel, jobs(), now_and_then), found_by_processes)
    assert len({*preempted}) > len(found_by_processes) // 2


def test_an_abort_on_the_way_leaves_nothing(parallel: ParallelEngine) -> None:
    core = parallel.llm.llm_engine
    core.add_request("gone", {"prompt_token_ids": prompt_of(40)}, beam_params(5, n=3, max_tokens=MAX_TOKENS))
    for _ in range(5):
        core.step()
    core.abort_request(["gone"])
    check_same(run(parallel, jobs()[:2]), run(parallel, jobs()[:2]))
    parallel.check_nothing_is_left()


def test_two_ranks_speculate_alike_and_drafts_that_differ_end_the_engine(
    engines: Engines, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    draft = models.make_draft(model, tmp_path_factory.mktemp("draft"), NOISE, seed=3)
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    kinds: list[dict[str, Any]] = [
        {},
        {"speculation": "off"},
        {"frequency_penalty": 0.4, "repetition_penalty": 1.2},
        {"do_sample": True, "seed": 3, "temperature": 0.7},
        {"do_sample": True, "seed": 3, "temperature": 0.7, "threshold": 0.7},
        {"do_sample": True, "seed": 3, "temperature": 0.7, "memory_mode": True},
    ]
    asked = [
        (prompt_of(length, length), beam_params(width, n=width, max_tokens=MAX_TOKENS, **options))
        for length in (5, BLOCK_SIZE - 2)
        for width in (2, 5)
        for options in kinds
    ]
    asked.append((prompt_of(9), SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=0)))

    def answers(engine: Engine, after_step: Callable[[], None] = lambda: None) -> list[Any]:
        found = run(engine, copied(asked), after_step)
        assert steps_per_forward(found[0]) > 1.2
        return found

    # What is drawn depends on what is left over to speculate with, and so on how steps are scheduled.
    expected = answers(engines(model, speculative_config=config, async_scheduling=False))
    parallel = ParallelEngine(model, speculative_config=config, async_scheduling=False)
    try:
        check_same(answers(parallel, parallel.check_rows), expected)
        parallel.check_nothing_is_left()
        parallel.llm.collective_rpc("go_astray", args=("drafts", 1))
        with pytest.raises(RuntimeError, match=r"disagree about the drafts of beam group .* \(rank 0 against rank 1\)"):
            run(parallel, copied(asked[:3]))
    finally:
        parallel.close()
