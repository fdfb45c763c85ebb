"""Prompts of searches come and go through a KV connector. However slow it is, and whatever fails, answers are equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.disturb import AbortWithin, preempt_all
from tests.support.engine import TRAINED_TARGET, Engine, Engines, num_used_blocks
from tests.support.memory_connector import MEMORY, forget_memory, memory_config
from tests.support.running import BYTES_PER_BLOCK, count_ties, prompt_of, run, trained_prompts
from vllm_trie import StepCandidate, beam_params

pytestmark = pytest.mark.slow

JOBS = [
    (prompt_of(100, 1), beam_params(6, n=6, max_tokens=40, ignore_eos=True)),
    (prompt_of(64, 2), beam_params(4, n=4, max_tokens=20)),
    (prompt_of(70, 3), SamplingParams(temperature=0, max_tokens=20)),
]
SEARCHES = JOBS[:2]
EITHER = [True, pytest.param(False, marks=pytest.mark.nightly)]  # way of scheduling
BLOCKS = {tuple(prompt[:end]) for prompt, _ in SEARCHES for end in range(32, len(prompt) + 1, 32)}


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    forget_memory()
    yield
    forget_memory()


@pytest.fixture
def start(engines: Engines, random_model: Callable[[str], Path]) -> Callable[..., Engine]:
    """Starts an engine with the tests' connector, which has computed nothing yet."""

    def start(role: str = "kv_both", policy: str = "recompute", model: str = "gqa", **options: Any) -> Engine:
        engines.close()
        options.setdefault("enable_prefix_caching", False)
        config = memory_config(role, kv_load_failure_policy=policy)
        return engines(random_model(model), kv_transfer_config=config, **options)

    return start


@pytest.fixture(scope="module")
def expected(_engines: Engines, random_model: Callable[[str], Path]) -> list[Any]:
    """What an engine without a connector answers."""
    return run(_engines(random_model("gqa")), JOBS)


def settle(engine: Engine) -> None:
    """Let the connector save what it still has to."""
    while engine.scheduler.has_requests():
        engine.llm.llm_engine.step()


def saved_by(start: Callable[..., Engine], **options: Any) -> None:
    """Let an engine save the prompts of all jobs."""
    engine = start(**options)
    run(engine, [(prompt, SamplingParams(temperature=0, max_tokens=1)) for prompt, _ in JOBS])
    settle(engine)


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("steps", [0, 3])
def test_prompts_are_saved_and_nothing_of_beams(
    start: Callable[..., Engine], expected: list[Any], steps: int, is_async: bool
) -> None:
    MEMORY.steps_to_save = steps
    engine = start(async_scheduling=is_async, max_num_batched_tokens=80, max_num_seqs=16)
    assert count_ties(run(engine, JOBS), expected) == 0
    settle(engine)
    assert {tokens for tokens in MEMORY.blocks if list(tokens[:32]) != JOBS[2][0][:32]} == BLOCKS
    shown = sum((Counter(step) for step in MEMORY.scheduled), Counter[str]())
    ended = {request_id: rest for request_id, *rest in MEMORY.finished}
    for number, (prompt, _) in enumerate(SEARCHES):
        (request_id,) = (id_ for id_ in shown if id_.startswith(f"{number}-"))
        assert shown[request_id] == len(prompt)
        assert ended[request_id] == [prompt, -(-len(prompt) // 32)]
    assert MEMORY.ended == set(shown), "a worker's connector hears of others than requests"


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("is_async", EITHER)
@pytest.mark.parametrize("steps", [0, 4])
def test_loaded_prompts_lead_to_the_same_answers(
    start: Callable[..., Engine], expected: list[Any], steps: int, is_async: bool, caching: bool
) -> None:
    saved_by(start)
    MEMORY.steps_to_load = steps
    # Those that are loaded and find no rows have none.
    loading = start("kv_consumer", async_scheduling=is_async, enable_prefix_caching=caching, max_num_seqs=6)
    found = run(loading, JOBS)
    assert count_ties(found, expected) == 0
    # A step computes one token at least.
    assert [output.num_cached_tokens for output in found] == ([96, 63, 64] if steps else [96, 32, 64])
    assert MEMORY.num_loaded == (7 if steps else 6)
    MEMORY.num_loaded = 0
    assert count_ties(run(loading, JOBS), expected) == 0
    if caching:  # of a prompt that fills its blocks vLLM caches all but the last one
        assert MEMORY.num_loaded == (1 if steps else 0)
    else:
        assert MEMORY.num_loaded == (7 if steps else 6)
    settle(loading)  # blocks that a step under way may write are free when it is over


def test_what_is_loaded_is_what_is_read(start: Callable[..., Engine], expected: list[Any]) -> None:
    saved_by(start)
    for content in MEMORY.blocks.values():
        content[:] = [layer.clone().zero_() for layer in content]
    found = run(start(), JOBS)
    for output, other in zip(found, expected, strict=True):
        assert [o.token_ids for o in output.outputs] != [o.token_ids for o in other.outputs]


@pytest.mark.parametrize("is_async", EITHER)
@pytest.mark.parametrize(
    ("steps", "by_blocks", "first", "asked", "loaded"),
    [(0, True, 0, 4, 0), (0, True, 1, 3, 2), (3, True, 0, 4, 5), (3, True, 1, 2, 2), (3, False, 0, 4, 5)],
)
def test_a_search_whose_load_fails_computes_its_prompt(
    start: Callable[..., Engine],
    expected: list[Any],
    steps: int,
    by_blocks: bool,
    first: int,
    asked: int,
    loaded: int,
    is_async: bool,
) -> None:
    """If all of an asynchronous load has failed, vLLM asks and loads again."""
    saved_by(start)
    MEMORY.steps_to_load, MEMORY.loads_to_fail, MEMORY.fails_by_blocks = steps, 2, by_blocks
    MEMORY.first_to_fail, MEMORY.num_asked = first, 0
    engine = start(async_scheduling=is_async, enable_prefix_caching=True)
    assert count_ties(run(engine, SEARCHES), expected[:2]) == 0
    assert (MEMORY.loads_to_fail, MEMORY.num_asked, MEMORY.num_loaded) == (0, asked, loaded)
    assert count_ties(run(engine, SEARCHES), expected[:2]) == 0, "what was not loaded is cached"


@pytest.mark.parametrize("is_async", EITHER)
@pytest.mark.parametrize(("steps", "by_blocks"), [(0, True), (3, True), (3, False)])
@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.nightly), 6])
def test_a_search_whose_load_fails_ends_and_says_why_if_that_is_the_policy(
    start: Callable[..., Engine], expected: list[Any], steps: int, by_blocks: bool, is_async: bool, n: int
) -> None:
    saved_by(start)
    MEMORY.steps_to_load, MEMORY.loads_to_fail, MEMORY.fails_by_blocks = steps, 1, by_blocks
    engine = start(policy="fail", async_scheduling=is_async, enable_prefix_caching=True)
    fails = (JOBS[0][0], beam_params(6, n=n, max_tokens=40, ignore_eos=True))
    failed, *others = run(engine, [fails, *JOBS[1:]])
    why = "MemoryConnector could not load the KV of its prompt; send it again, or start the engine with "
    for output in failed.outputs:
        assert (output.finish_reason, output.token_ids) == ("error", [])
        assert output.stop_reason == f"{why}kv_load_failure_policy='recompute' in kv_transfer_config"
    assert len(failed.outputs) == n
    assert count_ties(others, expected[1:]) == 0
    assert count_ties(run(engine, JOBS), expected) == 0


def test_a_search_that_the_connector_holds_back_waits_alone(start: Callable[..., Engine], expected: list[Any]) -> None:
    MEMORY.steps_held_back = 5
    engine = start()
    assert count_ties(run(engine, JOBS[:1]), expected[:1]) == 0
    assert MEMORY.num_asked == 6


def test_a_search_that_loads_and_has_no_rows_yet_holds_nobody_back(start: Callable[..., Engine]) -> None:
    saved_by(start)
    MEMORY.steps_to_load = 12
    core, finished = start("kv_consumer", max_num_seqs=6).llm.llm_engine, list[str]()
    long, short = (SamplingParams(max_tokens=count, ignore_eos=True) for count in (30, 2))
    for name, (prompt, params) in {
        "search": JOBS[0],
        "long": (prompt_of(10, 8), long),
        "short": (prompt_of(10, 9), short),
    }.items():
        core.add_request(name, {"prompt_token_ids": prompt}, params)
        core.step()
    for _ in range(6):
        finished += [output.request_id for output in core.step() if output.finished]
    assert (finished, MEMORY.num_loaded) == (["short"], 0)
    while core.has_unfinished_requests():
        finished += [output.request_id for output in core.step() if output.finished]
    assert finished == ["short", "long", "search"]


@pytest.mark.parametrize("is_async", EITHER)
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.nightly), 2, 4, 6])
def test_a_search_that_is_aborted_while_it_loads_leaves_nothing(
    start: Callable[..., Engine], expected: list[Any], monkeypatch: pytest.MonkeyPatch, step: int, is_async: bool
) -> None:
    saved_by(start)
    MEMORY.steps_to_load = 4
    engine = start(async_scheduling=is_async)
    with monkeypatch.context() as patched:
        AbortWithin(engine, patched, "0", step)
        found = run(engine, JOBS)
    assert count_ties(found[1:], expected[1:]) == 0
    settle(engine)
    engine.check_nothing_is_left()
    assert count_ties(run(engine, JOBS), expected) == 0


@pytest.mark.parametrize("is_async", EITHER)
def test_searches_preempted_while_another_loads_go_on(
    start: Callable[..., Engine], expected: list[Any], is_async: bool
) -> None:
    saved_by(start)
    for tokens in [tokens for tokens in MEMORY.blocks if list(tokens[:32]) == JOBS[0][0][:32]]:
        del MEMORY.blocks[tokens]  # it computes while the others load
    MEMORY.steps_to_load, num_steps = 8, 0
    engine = start(async_scheduling=is_async)

    def preempt() -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps in (4, 25):
            statuses = [request.status.name for request in engine.scheduler.requests.values()]
            assert ("WAITING_FOR_REMOTE_KVS" in statuses) is (num_steps == 4)
            preempt_all(engine)

    assert count_ties(run(engine, JOBS, preempt), expected) == 0
    assert MEMORY.num_loaded > 4, "a preempted search computes again what was saved"


def test_blocks_that_are_saved_late_come_back_before_a_search_is_said_to_starve(
    start: Callable[..., Engine], expected: list[Any]
) -> None:
    MEMORY.steps_to_save = 12
    engine = start(kv_cache_memory_bytes=18 * BYTES_PER_BLOCK)
    alone = (prompt_of(480, 4), beam_params(2, max_tokens=4, ignore_eos=True))  # takes all blocks but one
    run(engine, [alone])
    assert num_used_blocks(engine.scheduler.kv_cache_manager) == 15, "its prompt is held"
    assert count_ties(run(engine, SEARCHES[1:]), expected[1:2]) == 0
    settle(engine)
    saved = sum(list(tokens[:32]) == alone[0][:32] for tokens in MEMORY.blocks)
    assert saved == 15


def test_what_a_search_answers_enters_the_prefix_cache_and_is_saved_with_the_next_turn(
    start: Callable[..., Engine],
) -> None:
    engine = start(enable_prefix_caching=True)
    prompt, params = JOBS[0]
    (first,) = run(engine, [(prompt, params)])
    turn = [*prompt, *first.outputs[0].token_ids, 7, 8, 9]
    (second,) = run(engine, [(turn, beam_params(2, max_tokens=4))])
    assert second.num_cached_tokens == 128
    assert tuple(turn[:128]) in MEMORY.blocks


def test_an_answer_has_what_the_connector_and_what_the_search_say(start: Callable[..., Engine]) -> None:
    engine = start()
    params = beam_params(4, compact=True, max_tokens=5)
    params.extra_args["kv_transfer_params"] = {"anything": 1}
    (output,) = run(engine, [(JOBS[0][0], params)])
    assert output.kv_transfer_params["num_tokens"] == 100
    assert len(output.kv_transfer_params["trie_beam"]["token_ids"]) == 4
    (output,) = run(engine, [(JOBS[0][0], beam_params(4, n=2, max_tokens=5))])
    assert output.kv_transfer_params is None


def test_statistics_of_the_connector_and_of_searches_reach_the_front_end(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

    engine, seen = start(disable_log_stats=False), []
    monkeypatch.setattr(KVConnectorProm, "observe", lambda _, stats, *args: seen.append(stats))
    run(engine, JOBS)
    assert seen
    assert all(stats == {"steps": 1} for stats in seen)
    counts = {metric.name: metric.value for metric in engine.llm.get_metrics() if hasattr(metric, "value")}
    assert counts["vllm:trie_beam_steps"] > 40


@pytest.mark.parametrize("steps", [0, 5])
def test_a_search_by_steps_leaves_no_block_held(start: Callable[..., Engine], engines: Engines, steps: int) -> None:
    def score(candidates: list[StepCandidate]) -> list[float]:
        return [sum(map(ord, candidate.text)) % 100 / 100 for candidate in candidates]

    options = {"unit": "step", "step_stop": ["\n"], "scorer": score, "candidates": 3, "max_steps": 3}
    params = beam_params(2, n=2, max_tokens=32, seed=7, **options)
    (prompt,) = trained_prompts([60])
    (expected,) = engines(TRAINED_TARGET, max_num_seqs=16).generate([prompt], params)
    MEMORY.steps_to_save = steps
    engines.close()
    engine = engines(TRAINED_TARGET, max_num_seqs=16, kv_transfer_config=memory_config())
    (found,) = engine.generate([prompt], params)
    assert [o.token_ids for o in found.outputs] == [o.token_ids for o in expected.outputs]
    assert MEMORY.blocks
    settle(engine)
    engine.check_nothing_is_left()


@pytest.mark.parametrize("drafts", ["ngram", "draft_model"])
@pytest.mark.parametrize("steps", [0, 3])
def test_searches_that_speculate_load_and_save(
    start: Callable[..., Engine],
    expected: list[Any],
    random_pair: Callable[[str, float], tuple[Path, Path]],
    steps: int,
    drafts: str,
) -> None:
    by_lookup = {"method": "ngram", "prompt_lookup_max": 2}
    by_model = {"method": "draft_model", "model": str(random_pair("gqa", 0.02)[1])}
    speculative = {"num_speculative_tokens": 3, **(by_lookup if drafts == "ngram" else by_model)}
    MEMORY.steps_to_save = MEMORY.steps_to_load = steps
    saved_by(start, speculative_config=speculative)
    loading = start(speculative_config=speculative)
    assert count_ties(run(loading, JOBS), expected) == 0
    assert MEMORY.num_loaded >= 6
    settle(loading)
    assert count_ties(run(loading, JOBS), expected) == 0
    settle(loading)


@pytest.mark.parametrize("is_async", EITHER)
@pytest.mark.parametrize("steps", [0, 3])
def test_layers_with_windows_load_and_save(
    start: Callable[..., Engine], engines: Engines, random_model: Callable[[str], Path], steps: int, is_async: bool
) -> None:
    expected = run(engines(random_model("mistral")), JOBS)
    MEMORY.steps_to_save = MEMORY.steps_to_load = steps
    options = {"model": "mistral", "async_scheduling": is_async, "disable_hybrid_kv_cache_manager": True}
    saved_by(start, **options)
    loading = start(**options)
    assert count_ties(run(loading, JOBS), expected) == 0
    assert MEMORY.num_loaded > 0
    settle(loading)
