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

from tests.support.disturb import preempt_all
from tests.support.engine import BLOCK_SIZE, TRAINED_TARGET, Engine, Engines
from tests.support.grammars import GRAMMARS, structured
from tests.support.head_alone import heading
from tests.support.items import random_items
from tests.support.pairs import NOISE, Pair, drafting, looking_up, steps_per_forward
from tests.support.parallel_engine import RANKS, ParallelEngine
from tests.support.ray_on_cpu import local_ray
from tests.support.running import prompt_of, run, trained_prompts
from tests.support.traffic import MAX_BATCHED, MAX_TOKENS, check_same, copied, jobs
from vllm_trie import beam_params
from vllm_trie.catalog import Catalog
from vllm_trie.options.item_ids import ItemIds

pytestmark = pytest.mark.slow


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


def test_two_ranks_find_what_one_finds(
    engines: Engines, model: Path, parallel: ParallelEngine, found_by_processes: list[Any]
) -> None:
    expected = run(engines(model, max_num_batched_tokens=MAX_BATCHED), jobs())
    stops = [hypothesis.finish_reason for output in expected for hypothesis in output.outputs]
    assert {"stop", "length"} <= {*stops}
    check_same(found_by_processes, expected)


# The second is vLLM's older executor, which Ray hands arrays in memory that it would like to have back.
@pytest.mark.nightly
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


@pytest.mark.nightly
def test_two_ranks_find_what_one_finds_where_rows_have_states(
    engines: Engines, random_model: Callable[[str], Path]
) -> None:
    model = random_model("falcon_h1")
    expected = run(engines(model, max_num_batched_tokens=MAX_BATCHED), jobs())
    parallel = ParallelEngine(model, max_num_batched_tokens=MAX_BATCHED)
    try:
        check_same(run(parallel, jobs(), parallel.check_rows), expected)
        parallel.check_nothing_is_left()
    finally:
        parallel.close()


def test_an_abort_on_the_way_leaves_nothing(parallel: ParallelEngine) -> None:
    core = parallel.llm.llm_engine
    core.add_request("gone", {"prompt_token_ids": prompt_of(40)}, beam_params(5, n=3, max_tokens=MAX_TOKENS))
    for _ in range(5):
        core.step()
    core.abort_request(["gone"])
    check_same(run(parallel, jobs()[:2]), run(parallel, jobs()[:2]))
    parallel.check_nothing_is_left()


def test_two_ranks_follow_grammars_alike(engines: Engines) -> None:
    prompts = trained_prompts([7, 31, 45, 20, 12, 60])
    asked = [
        (prompt, beam_params(4, n=4, max_tokens=16, structured_outputs=structured(name)))
        for prompt, name in zip(prompts, GRAMMARS, strict=True)
    ]
    asked.append((prompts[0], SamplingParams(temperature=0, max_tokens=16, structured_outputs=structured("schema"))))
    expected = run(engines(TRAINED_TARGET), copied(asked))
    parallel = ParallelEngine(TRAINED_TARGET)
    try:
        check_same(run(parallel, copied(asked)), expected)
        parallel.check_nothing_is_left()
    finally:
        parallel.close()


def test_two_ranks_exclude_the_items_that_one_excludes(engines: Engines, model: Path, tmp_path: Path) -> None:
    items = random_items(400, [2, 3, 4], tokens=(2, 60))
    Catalog.from_sequences(items).save(tmp_path / "items.catalog")
    catalogs = {"items": str(tmp_path / "items.catalog")}
    excluded = [[*range(first, len(items), step)] for first, step in ((0, 2), (1, 3), (0, 400), (0, 2))]
    asked = [
        (prompt_of(20 + 7 * number, number), beam_params(4, n=4, catalog="items", max_tokens=8, **options))
        for number, ids in enumerate(excluded)
        for options in ({"exclude_items": ids}, {"exclude_items": ids, "catalog_renormalize": True}, {})
    ]
    expected = run(engines(model, additional_config={"trie_beam": {"catalogs": catalogs}}), copied(asked))
    parallel = ParallelEngine(model, catalogs=catalogs)
    try:
        found = run(parallel, copied(asked), parallel.check_rows)
        check_same(found, expected)
        for (_, params), output in zip(asked, found, strict=True):
            ids = (params.extra_args or {}).get("exclude_items", ItemIds()).numbers.tolist()
            assert {tuple(o.token_ids) for o in output.outputs} <= {*items} - {items[own] for own in ids}
        parallel.check_nothing_is_left()
    finally:
        parallel.close()


def check_that_other_drafts_end(parallel: ParallelEngine, source: str, asked: list[Any]) -> None:
    """An engine ends where one rank drafts otherwise than the others."""
    parallel.llm.collective_rpc("go_astray", args=(source, 1))
    with pytest.raises(RuntimeError, match=r"disagree about the drafts of beam group .* \(rank 0 against rank 1\)"):
        run(parallel, copied(asked))


@pytest.mark.nightly
@pytest.mark.parametrize("drafts_by", ["a draft model", "a head"])
def test_two_ranks_speculate_alike_and_drafts_that_differ_end_the_engine(
    engines: Engines, random_pair: Callable[[str, float], Pair], drafts_by: str
) -> None:
    pair = random_pair("gqa", NOISE)
    model, config = (TRAINED_TARGET, heading(3)) if drafts_by == "a head" else (pair[0], drafting(pair[1], 3))
    exact: dict[str, Any] = {"speculation": "exact"}  # "auto" would depend on what steps happen to cost
    kinds = [
        exact,
        {"speculation": "off"},
        {**exact, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
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

    # What is sampled depends on what is left over to speculate with, and so on how steps are scheduled.
    expected = answers(engines(model, **config, async_scheduling=False))
    parallel = ParallelEngine(model, **config, async_scheduling=False)
    try:
        check_same(answers(parallel, parallel.check_rows), expected)
        parallel.check_nothing_is_left()
        check_that_other_drafts_end(parallel, "drafts", asked[:3])
    finally:
        parallel.close()


@pytest.mark.nightly
def test_two_ranks_look_up_alike_and_one_that_looks_elsewhere_ends_the_engine(
    engines: Engines, copying_model: Path
) -> None:
    prompts = [[*prompt_of(length, length)] * 2 for length in (5, BLOCK_SIZE - 2)]
    asked = [(p, beam_params(width, n=width, max_tokens=MAX_TOKENS)) for p in prompts for width in (1, 4)]
    expected = run(engines(copying_model, **looking_up(3)), copied(asked))
    assert max(map(steps_per_forward, expected)) > 1.2
    parallel = ParallelEngine(copying_model, **looking_up(3))
    try:
        check_same(run(parallel, copied(asked), parallel.check_rows), expected)
        parallel.check_nothing_is_left()
        check_that_other_drafts_end(parallel, "n-grams", asked[:2])
    finally:
        parallel.close()
