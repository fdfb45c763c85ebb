"""Beams are transformers' with async scheduling and without, and the worker's rows are what the scheduler believes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.engine import BLOCK_SIZE, Engines
from tests.support.pairs import NOISE
from tests.support.reference import agree, engine_answers, transformers_beams, transformers_greedy
from tests.support.running import prompt_of
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

MAX_TOKENS = 14
# Prompt length, width, whether EOS is ignored. Two of them cross a block boundary.
SEARCHES = [(BLOCK_SIZE - 1, 2, False), (5, 5, True), (2 * BLOCK_SIZE - 4, 5, False)]
LIMITS: dict[str, Any] = {"max_model_len": 128, "max_num_batched_tokens": 64}  # chunked prefill
MODES = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def jobs() -> list[tuple[list[int], SamplingParams]]:
    searches: list[tuple[list[int], SamplingParams]] = [
        (prompt_of(length), beam_params(width, n=width, max_tokens=MAX_TOKENS, ignore_eos=ignore))
        for length, width, ignore in SEARCHES
    ]
    return [*searches, (prompt_of(40), SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True))]


def answers(engine: Any) -> list[Any]:
    return engine.generate(*zip(*jobs(), strict=True))


def check_answers(outputs: list[Any], model: Path) -> None:
    *searches, greedy = outputs
    for output, (length, width, ignore_eos) in zip(searches, SEARCHES, strict=True):
        eos = None if ignore_eos else 1
        theirs = transformers_beams(model, prompt_of(length), width, width, MAX_TOKENS, eos_token_id=eos)
        assert agree(engine_answers(output, 1.0), theirs)
    expected = transformers_greedy(model, prompt_of(40), MAX_TOKENS)
    assert [*greedy.outputs[0].token_ids][: len(expected)] == expected


@MODES
@pytest.mark.parametrize("kind", ["gqa", "gemma2"])  # two KV cache groups
def test_answers_are_those_of_transformers(
    engines: Engines,
    random_model: Callable[[str], Path],
    kind: str,
    is_async: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model(kind)
    engine = engines(model, **LIMITS, async_scheduling=is_async)
    engine.watched.restart()
    check_answers(answers(engine), model)
    assert engine.watched.num_compared > 5 * MAX_TOKENS / 2
    assert engine.watched.most_pending == 1 + is_async


@MODES
def test_a_pool_driven_to_its_end_preempts_and_answers_the_same(
    engines: Engines, random_model: Callable[[str], Path], is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(random_model("gqa"), **LIMITS, async_scheduling=is_async, num_gpu_blocks_override=13)
    pool = engine.scheduler.kv_cache_manager.block_pool
    engine.watched.restart()
    preempted, least = [], []
    preempt, update = engine.scheduler._preempt_request, engine.scheduler.update_from_output

    def seen(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    def measured(*args: Any) -> Any:
        least.append(pool.get_num_free_blocks())
        return update(*args)

    monkeypatch.setattr(engine.scheduler, "_preempt_request", seen)
    monkeypatch.setattr(engine.scheduler, "update_from_output", measured)
    check_answers(answers(engine), random_model("gqa"))
    assert preempted
    assert min(least) <= 1
    assert engine.watched.num_compared


@MODES
@pytest.mark.parametrize("speculation", ["off", "exact"])
def test_ordinary_requests_speculate_in_a_batch_with_beams(
    engines: Engines,
    random_pair: Callable[[str, float], tuple[Path, Path]],
    speculation: str,
    is_async: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, draft = random_pair("gqa", NOISE)
    engine = engines(
        model,
        **LIMITS,
        async_scheduling=is_async,
        speculative_config={"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3},
        additional_config={"trie_beam": {"check_invariants": True, "speculation": speculation}},
        disable_log_stats=False,
    )
    engine.watched.restart()
    outputs = answers(engine)
    check_answers(outputs, model)
    steps = [output.kv_transfer_params["trie_beam"] for output in outputs[:-1] if output.kv_transfer_params is not None]
    assert len(steps) == (len(SEARCHES) if speculation == "exact" else 0)
    assert all(of_search["steps_per_forward"] > 1.2 for of_search in steps)
    assert engine.watched.num_compared > 0
    assert engine.watched.most_pending == 1 + (is_async and speculation == "off")
    accepted = sum(m.value for m in engine.llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")
    assert accepted > 0, "ordinary requests do not speculate"


def test_rows_hold_what_the_scheduler_believes_after_every_step(
    engines: Engines, random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(random_model("gqa"))
    core, shuffled = engine.llm.llm_engine, random.Random(3)
    engine.watched.restart()
    for number, width in enumerate((1, 2, 5, 8, 8, 15)):
        prompt = [shuffled.randrange(2, 300) for _ in range(shuffled.randrange(1, 3 * BLOCK_SIZE))]
        params = beam_params(width, max_tokens=90, ignore_eos=number % 2 == 0)
        core.add_request(f"group {number}", {"prompt_token_ids": prompt}, params)
        ordinary = SamplingParams(max_tokens=10 * number + 1, ignore_eos=True)
        core.add_request(f"ordinary {number}", {"prompt_token_ids": prompt}, ordinary)
    while core.has_unfinished_requests():
        core.step()
    assert engine.watched.num_compared > 20 * 2 * BLOCK_SIZE
    assert engine.watched.most_pending == 2
