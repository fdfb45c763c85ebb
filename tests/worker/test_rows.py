"""The worker's rows and the scheduler's tries say the same after every step, without ever exchanging histories."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from vllm import SamplingParams

from tests.conftest import BLOCK_SIZE, Engines
from vllm_trie import beam_params


def test_rows_hold_what_the_scheduler_believes_after_every_step(
    engines: Engines, random_model: Callable[[str], Path]
) -> None:
    engine = engines(random_model("gqa"))
    core, shuffled = engine.llm.llm_engine, random.Random(3)
    for number, width in enumerate((1, 2, 5, 8, 8, 15)):
        prompt = [shuffled.randrange(2, 300) for _ in range(shuffled.randrange(1, 3 * BLOCK_SIZE))]
        params = beam_params(width, max_tokens=90, ignore_eos=number % 2 == 0)
        core.add_request(f"group {number}", {"prompt_token_ids": prompt}, params)
        ordinary = SamplingParams(max_tokens=10 * number + 1, ignore_eos=True)
        core.add_request(f"beside {number}", {"prompt_token_ids": prompt}, ordinary)
    steps = 0
    while core.has_unfinished_requests():
        core.step()
        engine.check_rows()
        steps += 1
    assert steps > 2 * BLOCK_SIZE
