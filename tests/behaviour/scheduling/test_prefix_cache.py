"""What the prefix cache holds is true: whatever a search did, its hypotheses continue from it as from scratch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams

from tests.support.disturb import preempt_all
from tests.support.engine import BLOCK_SIZE, Engine, Engines
from tests.support.reference import transformers_greedy
from tests.support.running import prompt_of, run
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

Replay = Callable[[Callable[[Engine], None]], None]


@pytest.fixture
def replayed(engines: Engines, random_model: Callable[[str], Path]) -> Iterator[Replay]:
    """Search, cache, preempt, resume; then replay every hypothesis as a prompt from the prefix cache."""
    model = random_model("gqa")
    engine = engines(model)

    def replay(tamper: Callable[[Engine], None]) -> None:
        assert engine.llm.llm_engine.reset_prefix_cache()
        steps = 0

        def cache_and_preempt() -> None:
            nonlocal steps
            steps += 1
            for request in engine.scheduler.running:  # as vLLM 0.33 does after every step that had drafts
                engine.scheduler.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
            if steps % 20 == 0:
                preempt_all(engine)

        prompts = [prompt_of(3 * BLOCK_SIZE) + prompt_of(extra, extra) for extra in (0, 1, 40)]
        jobs = [(prompt, beam_params(4, n=4, max_tokens=80, ignore_eos=True)) for prompt in prompts]
        outputs = run(engine, jobs, cache_and_preempt)
        tamper(engine)
        for prompt, output in zip(prompts, outputs, strict=True):
            for hypothesis in output.outputs:
                history = [*prompt, *hypothesis.token_ids]
                (greedy,) = engine.generate([history], SamplingParams(temperature=0, max_tokens=5))
                assert greedy.num_cached_tokens >= len(prompt) // BLOCK_SIZE * BLOCK_SIZE
                assert [*greedy.outputs[0].token_ids] == transformers_greedy(model, history, 5), "a block is poisoned"

    yield replay
    assert engine.llm.llm_engine.reset_prefix_cache()


def test_the_prefix_cache_holds_true_history_only(replayed: Replay) -> None:
    replayed(lambda engine: None)


def test_a_poisoned_block_would_be_seen(replayed: Replay) -> None:
    def poison(engine: Engine) -> None:
        blocks = engine.scheduler.kv_cache_manager.block_pool.blocks
        block = random.Random(0).choice([block for block in blocks if block.block_hash is not None])
        for cache in engine.runner.kv_caches:
            cache[block.block_id] = torch.randn_like(cache[block.block_id])

    with pytest.raises(AssertionError, match="a block is poisoned"):
        replayed(poison)
