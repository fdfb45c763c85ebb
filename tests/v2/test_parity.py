"""Beams on the V2 runner are transformers' and the V1 runner's, with async scheduling and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.conftest import BLOCK_SIZE, Engines
from tests.engine.test_scheduling import prompt_of
from tests.reference import agree, engine_answers, transformers_beams, transformers_greedy
from tests.v2.rows import WatchedRows
from vllm_trie import beam_params

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
@pytest.mark.parametrize("kind", ["gqa", "mha", "gemma2"])
def test_answers_are_those_of_transformers(
    engines: Engines,
    random_model: Callable[[str], Path],
    kind: str,
    is_async: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model(kind)
    engine = engines(model, **LIMITS, async_scheduling=is_async)
    watched = WatchedRows(engine, monkeypatch)
    check_answers(answers(engine), model)
    assert watched.num_compared > 5 * MAX_TOKENS / 2
    assert watched.most_pending == 1 + is_async


@MODES
def test_a_pool_driven_to_its_end_preempts_and_answers_the_same(
    engines: Engines, random_model: Callable[[str], Path], is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(random_model("gqa"), **LIMITS, async_scheduling=is_async, num_gpu_blocks_override=13)
    watched, pool = WatchedRows(engine, monkeypatch), engine.scheduler.kv_cache_manager.block_pool
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
    assert watched.num_compared


def test_both_runners_answer_the_same(
    engines: Engines, random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model("gqa")
    ours = answers(engines(model, **LIMITS, async_scheduling=True))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    engine = engines(model, **LIMITS)
    assert type(engine.runner).__name__ == "BeamCPUModelRunner"
    for our, their in zip(ours, answers(engine), strict=True):
        assert [o.token_ids for o in our.outputs] == [o.token_ids for o in their.outputs]
        for a, b in zip(our.outputs, their.outputs, strict=True):
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-4) or b.cumulative_logprob is None
    engines.close()  # while an engine lives, vLLM remembers the environment that it began in
