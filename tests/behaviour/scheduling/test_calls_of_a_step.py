"""How much of ours a reader meets in one step: files, functions and calls, counted."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from typing import Any

import pytest
from vllm import SamplingParams

from tests.golden.run import Unwatched
from tests.support.calls import num_calls
from tests.support.engine import TRAINED_TARGET, Engine, Engines
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

FEW, MANY = 20, 52  # tokens: what comes with each of the steps in between is one step


def calls(engine: Engine, make_params: Callable[..., SamplingParams], num_tokens: int) -> dict[tuple[str, str], int]:
    """How often each function of ours is called, by its file and name."""
    params = make_params(n=4, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    engine.generate([[*range(5, 25)]], params)
    profile = cProfile.Profile()
    profile.runcall(engine.generate, [[*range(5, 25)]], params)
    entries = pstats.Stats(profile).stats.items()
    return {(file.split("/vllm_trie/")[1], name): of[1] for (file, _, name), of in entries if "/vllm_trie/" in file}


def calls_of_a_step(engine: Engine, make_params: Callable[..., SamplingParams]) -> tuple[int, int, float]:
    """Of files, of functions and in all, where a function is called in each step."""
    few, many = (calls(engine, make_params, count) for count in (FEW, MANY))
    more = {key: count - few.get(key, 0) for key, count in many.items()}
    often = {key: count for key, count in more.items() if count > MANY - FEW - 3}
    return len({file for file, _ in often}), len(often), sum(often.values()) / (MANY - FEW)


def test_a_step_without_beams_meets_few_functions_and_one_with_beams_few_files(engines: Engines) -> None:
    engines.close()
    limits: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory_bytes": 1 << 26, "async_scheduling": True}
    engine = Unwatched(TRAINED_TARGET, additional_config={"trie_beam": {}}, **limits)
    try:
        num_files, num_functions, num_calls = calls_of_a_step(engine, SamplingParams)
        assert 0 < num_files <= 8  # one of them for attention, which calls it once in each layer
        assert num_functions <= 16
        assert num_calls <= 30
        num_files, num_functions, num_calls = calls_of_a_step(engine, lambda **all_: beam_params(4, **all_))
        assert 10 < num_files <= 33
        assert num_functions <= 137
        assert num_calls < 185
    finally:
        engine.close()


def test_searches_that_wait_in_the_queue_cost_a_step_nothing(engines: Engines) -> None:
    engines.close()
    limits: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory_bytes": 1 << 26, "max_num_seqs": 4}
    engine = Unwatched(TRAINED_TARGET, additional_config={"trie_beam": {}}, disable_log_stats=False, **limits)
    core, counts = engine.llm.llm_engine, list[int]()
    try:
        for num_queued in (1, 100):
            names = [f"{num_queued}-{number}" for number in range(num_queued + 1)]
            for name in names:  # the first one takes all rows
                params = beam_params(4, max_tokens=60, ignore_eos=True, detokenize=False)
                core.add_request(name, {"prompt_token_ids": [*range(5, 25)]}, params)
            for _ in range(5):
                core.step()
            counts.append(min(num_calls(core.step) for _ in range(5)))
            core.abort_request(names)
            while core.has_unfinished_requests():
                core.step()
    finally:
        engine.close()
    assert counts[1] - counts[0] < 10
