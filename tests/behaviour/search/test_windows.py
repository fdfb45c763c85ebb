"""Where attention sees a window only: blocks behind it are given back, and what that means under pressure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.support import models
from tests.support.disturb import preempt_all
from tests.support.engine import BLOCK_SIZE, Engines
from tests.support.running import BYTES_PER_BLOCK, count_ties, prompt_of, run
from vllm_trie import beam_params

pytestmark = pytest.mark.slow


def test_a_model_with_windows_has_a_trie_per_kv_cache_group_and_gives_back_what_left_the_window(
    engines: Engines, random_model: Callable[[str], Path]
) -> None:
    engine = engines(random_model("gemma2"), max_num_batched_tokens=64)
    manager = engine.scheduler.kv_cache_manager
    core = engine.llm.llm_engine
    core.add_request("g", {"prompt_token_ids": prompt_of(100)}, beam_params(4, max_tokens=130, ignore_eos=True))
    most_held = {}
    while core.has_unfinished_requests():
        core.step()
        for group in [group for group in manager._groups.values() if group.tries]:
            for trie, kv_cache_group in zip(group.tries, engine.scheduler.kv_cache_config.kv_cache_groups, strict=True):
                kind = type(kv_cache_group.kv_cache_spec).__name__
                held = max(len(trie.row_blocks(row)) for row in range(trie.width))
                most_held[kind] = max(most_held.get(kind, 0), held)
    blocks_of_window = (models.WINDOW - 2) // BLOCK_SIZE + 2
    assert most_held == {"SlidingWindowSpec": blocks_of_window, "FullAttentionSpec": 230 // BLOCK_SIZE + 1}


@pytest.mark.parametrize(
    ("kind", "num_blocks", "budget"), [("mistral", 11, 128), ("mistral", 18, 512), ("gemma2", 37, 512)]
)
def test_a_group_that_its_windows_leave_no_room_to_start_ends_with_an_error(
    engines: Engines, random_model: Callable[[str], Path], kind: str, num_blocks: int, budget: int
) -> None:
    limits = {"max_model_len": 448, "max_num_batched_tokens": budget, "async_scheduling": False}
    engine = engines(random_model(kind), kv_cache_memory_bytes=num_blocks * BYTES_PER_BLOCK, **limits)
    jobs = [(prompt_of(400), beam_params(8, n=2, max_tokens=40)), (prompt_of(10), SamplingParams(max_tokens=3))]
    failed, fine = run(engine, jobs)
    assert {o.finish_reason for o in failed.outputs} == {"error"}
    assert "KV blocks" in failed.outputs[0].stop_reason
    assert fine.outputs[0].token_ids


def test_a_group_whose_histories_reach_behind_the_window_searches_anew(
    engines: Engines, random_model: Callable[[str], Path]
) -> None:
    engine = engines(random_model("mistral"), kv_cache_memory_bytes=30 * BYTES_PER_BLOCK)
    params = beam_params(6, n=6, max_tokens=160, sample_first=120, seed=4, ignore_eos=True)
    jobs = [(prompt_of(40), params)]
    expected = run(engine, [(prompt, one.clone()) for prompt, one in jobs])
    steps = 0

    def preempt_once() -> None:
        nonlocal steps
        steps += 1
        if steps == 110:
            preempt_all(engine)

    assert count_ties(run(engine, jobs, preempt_once), expected) == 0
    assert steps >= 110 + 160
