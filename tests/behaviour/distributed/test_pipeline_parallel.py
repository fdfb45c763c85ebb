"""A pipeline of two stages finds what one rank finds, and what transformers does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.disturb import Clumsy, pending
from tests.support.engine import BLOCK_SIZE, TRAINED_TARGET, Engines
from tests.support.grammars import GRAMMARS, structured
from tests.support.images import make_model, prompts, why_not
from tests.support.images import run as run_behind_images
from tests.support.parallel_engine import ParallelEngine
from tests.support.reference import agree, engine_answers, transformers_beams
from tests.support.running import prompt_of, run, trained_prompts
from tests.support.traffic import MAX_BATCHED, check_same, copied, jobs
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

MAX_TOKENS = 14
# Prompt length, width, whether EOS is ignored. Two of them cross a block boundary.
SEARCHES = [(BLOCK_SIZE - 1, 2, False), (5, 5, True), (2 * BLOCK_SIZE - 4, 5, False), (3 * BLOCK_SIZE, 4, True)]


def searches() -> list[tuple[list[int], SamplingParams]]:
    return [
        (prompt_of(length), beam_params(width, n=width, max_tokens=MAX_TOKENS, ignore_eos=ignore_eos))
        for length, width, ignore_eos in SEARCHES
    ]


def check_like_transformers(outputs: list[Any], model: Path) -> None:
    for output, (length, width, ignore_eos) in zip(outputs, SEARCHES, strict=True):
        eos = None if ignore_eos else 1
        theirs = transformers_beams(model, prompt_of(length), width, width, MAX_TOKENS, eos_token_id=eos)
        assert agree(engine_answers(output, 1.0), theirs)


@pytest.fixture(scope="module")
def model(random_model: Callable[[str], Path]) -> Path:
    return random_model("gqa")


@pytest.fixture(scope="module")
def pipeline(model: Path) -> Iterator[ParallelEngine]:
    engine = ParallelEngine(model, "pipeline", max_num_batched_tokens=MAX_BATCHED)
    yield engine
    engine.close()


def test_two_stages_find_what_transformers_finds_alone_and_together(
    pipeline: ParallelEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most_pending, scheduler = 0, pipeline.scheduler

    def look(*args: Any) -> Any:
        nonlocal most_pending
        most_pending = max(most_pending, pending(pipeline))
        return type(scheduler).update_from_output(scheduler, *args)

    monkeypatch.setattr(scheduler, "update_from_output", look)
    alone = [output for search in searches() for output in run(pipeline, [search])]  # between its steps come empty ones
    check_like_transformers(alone, model)
    check_like_transformers(run(pipeline, searches()), model)
    assert most_pending == 2, "no step was scheduled before the last one's result"
    pipeline.check_nothing_is_left()


@pytest.mark.nightly
def test_two_stages_answer_mixed_traffic_as_one_rank(engines: Engines, model: Path, pipeline: ParallelEngine) -> None:
    found = run(pipeline, jobs())
    pipeline.check_nothing_is_left()
    check_same(found, run(engines(model, max_num_batched_tokens=MAX_BATCHED), jobs()))


def test_a_preempted_group_goes_on_alike_on_all_stages(pipeline: ParallelEngine, model: Path) -> None:
    clumsy = Clumsy(pipeline)
    check_like_transformers(run(pipeline, searches(), clumsy.preempt_whenever_a_search_is_further), model)
    assert clumsy.num_preempted > MAX_TOKENS / 2
    pipeline.check_nothing_is_left()


def test_an_abort_on_the_way_leaves_nothing(pipeline: ParallelEngine, model: Path) -> None:
    core = pipeline.llm.llm_engine
    core.add_request("gone", {"prompt_token_ids": prompt_of(40)}, beam_params(5, n=3, max_tokens=MAX_TOKENS))
    for _ in range(7):
        core.step()
    core.abort_request(["gone"])
    check_like_transformers(run(pipeline, searches()), model)
    pipeline.check_nothing_is_left()


@pytest.mark.nightly
def test_two_stages_follow_grammars_as_one_rank(engines: Engines) -> None:
    prompts = trained_prompts([7, 31, 45, 20, 12, 60])
    asked = [
        (prompt, beam_params(4, n=4, max_tokens=16, structured_outputs=structured(name)))
        for prompt, name in zip(prompts, GRAMMARS, strict=True)
    ]
    expected = run(engines(TRAINED_TARGET), copied(asked))
    pipeline = ParallelEngine(TRAINED_TARGET, "pipeline")
    try:
        check_same(run(pipeline, copied(asked)), expected)
        pipeline.check_nothing_is_left()
    finally:
        pipeline.close()


@pytest.mark.skipif(why_not("qwen2_5_vl") is not None, reason=why_not("qwen2_5_vl") or "")
@pytest.mark.nightly
def test_two_stages_see_images_as_one_rank_does(engines: Engines, tmp_path: Path) -> None:
    model = make_model("qwen2_5_vl", tmp_path)
    limits: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 16}
    limits["limit_mm_per_prompt"] = {"image": 2, "video": 0}
    asked = [(prompt, beam_params(4, n=4, max_tokens=30, ignore_eos=True)) for prompt in prompts("qwen2_5_vl")]
    expected = run_behind_images(engines(model, **limits), asked)
    pipeline = ParallelEngine(model, "pipeline", **limits)
    try:
        for preempted_at in ((), (8, 21)):
            found = run_behind_images(pipeline, asked, preempted_at)
            assert [[o.token_ids for o in output.outputs] for output in found] == [
                [o.token_ids for o in output.outputs] for output in expected
            ]
            pipeline.check_nothing_is_left()
    finally:
        pipeline.close()


@pytest.mark.parametrize(
    ("kind", "is_async"),
    [
        pytest.param("gemma2", False, id="layers with a window, and without"),
        pytest.param("falcon_h1", True, id="layers with states and attention", marks=pytest.mark.nightly),
    ],
)
def test_stages_find_what_transformers_finds_where_each_lets_rows_continue_others(
    random_model: Callable[[str], Path], kind: str, is_async: bool
) -> None:
    model = random_model(kind)
    pipeline = ParallelEngine(model, "pipeline", async_scheduling=is_async)
    try:
        check_like_transformers(run(pipeline, searches()), model)
        pipeline.check_nothing_is_left()
        pipeline.llm.collective_rpc("ignore_parents", args=(0,))
        outputs = run(pipeline, searches())
        with pytest.raises(AssertionError, match=r"Answer\(.*Answer\("):
            check_like_transformers(outputs, model)
    finally:
        pipeline.close()
