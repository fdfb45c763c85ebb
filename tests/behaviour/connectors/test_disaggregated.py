"""One engine computes prompts, with or without beams, and another one searches; answers are one engine's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.support.engine import Engine, Engines
from tests.support.memory_connector import MEMORY, forget_memory, memory_config
from tests.support.running import count_ties, prompt_of, run
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

JOBS = [
    (prompt_of(100, 1), beam_params(6, n=6, max_tokens=40, ignore_eos=True)),
    (prompt_of(64, 2), beam_params(4, n=4, max_tokens=20)),
    (prompt_of(70, 3), SamplingParams(temperature=0, max_tokens=20)),
    (prompt_of(20, 4), beam_params(3, compact=True, max_tokens=10)),
]


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    forget_memory()
    yield
    forget_memory()


@pytest.mark.parametrize("is_async", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("prefills", ["without beams", "with beams", "by searches"])
def test_a_prompt_that_another_engine_has_computed_leads_to_the_same_answer(
    engines: Engines, random_model: Callable[[str], Path], prefills: str, is_async: bool
) -> None:
    """As a proxy does it: each request goes to one engine for one token, and then to the other with what that says."""
    model = random_model("gqa")
    expected = run(engines(model), JOBS)
    engines.close()
    options = {"async_scheduling": is_async, "enable_prefix_caching": False}
    if prefills == "without beams":
        options["additional_config"] = {}
    MEMORY.steps_to_save = 2
    first = Engine(model, kv_transfer_config=memory_config("kv_producer"), **options)
    one_token = []
    for prompt, params in JOBS:
        params = params.clone() if prefills == "by searches" else SamplingParams(temperature=0)
        params.max_tokens = 1
        params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": {"do_remote_decode": True}}
        one_token.append((prompt, params))
    handed_over = [output.kv_transfer_params for output in run(first, one_token)]
    while first.scheduler.has_requests():
        first.llm.llm_engine.step()
    assert first.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() > 0
    assert not first.scheduler.requests, "what was handed over is still held"
    first.close()

    assert [len(MEMORY.handed_over[params["remote_request"]]) for params in handed_over] == [4, 2, 3, 1]
    MEMORY.blocks.clear()
    MEMORY.steps_to_load, MEMORY.steps_to_save = 3, 0
    second = engines(
        model, kv_transfer_config=memory_config("kv_consumer"), async_scheduling=is_async, enable_prefix_caching=False
    )
    jobs = []
    for (prompt, params), handed in zip(JOBS, handed_over, strict=True):
        params = params.clone()
        sent = {key: value for key, value in handed.items() if key != "trie_beam"}
        params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": sent}
        jobs.append((prompt, params))
    num_steps = len(MEMORY.scheduled)
    found = run(second, jobs)
    assert count_ties(found, expected) == 0
    assert MEMORY.num_loaded == 4 + 2 + 3 + 1
    shown = sum((Counter(step) for step in MEMORY.scheduled[num_steps:]), Counter[str]())
    assert [shown[id_] for id_ in sorted(shown) if not id_.startswith("2-")] == [1, 1, 1]
    assert found[3].kv_transfer_params["trie_beam"] == expected[3].kv_transfer_params["trie_beam"]
