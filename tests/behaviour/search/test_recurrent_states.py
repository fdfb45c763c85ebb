"""Beams of models with recurrent states, whose blocks lie over those of attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

from benchmarks.architectures.gated_delta import float32_attention
from tests.support.disturb import preempt_all
from tests.support.engine import Engines
from tests.support.running import MOST_TIES, count_ties, prompt_of, run
from vllm_trie import beam_params
from vllm_trie.worker.kv import kv_moves

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("caching", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_what_blocks_held_before_is_never_read(
    engines: Engines, random_model: Callable[[str], Path], caching: bool
) -> None:
    engine = engines(random_model("granite4"), enable_prefix_caching=caching)
    prompts = [prompt_of(length, length) for length in (5, 62, 100)]
    params = beam_params(4, n=4, max_tokens=70, ignore_eos=True)
    expected = engine.generate(prompts, params)
    assert engine.llm.llm_engine.reset_prefix_cache() or not caching
    for cache in engine.runner.kv_caches:
        cache.view(torch.int8).fill_(-1)  # no numbers, whatever reads them
    found = engine.generate(prompts, params)
    for output, same in zip(found, expected, strict=True):
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in same.outputs]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "is_async"), [("granite4", False), ("granite4", True), ("mamba2", False), ("qwen3_next", True)]
)
def test_searches_that_go_on_from_cached_states_find_what_they_find_without(
    engines: Engines,
    random_model: Callable[[str], Path],
    kind: str,
    is_async: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gdn_attention, "cpu_gdn_attention_core", float32_attention)
    options = {"async_scheduling": is_async, "max_num_batched_tokens": 400}
    engine, steps = engines(random_model(kind), enable_prefix_caching=True, **options), 0
    size = engine.core.vllm_config.cache_config.block_size

    def preempt_twice() -> None:
        nonlocal steps
        steps += 1
        if steps in (15, 40):
            preempt_all(engine)

    prompts = [prompt_of(length, number) for number, length in enumerate((20, size - 9, size, size + 30))]
    asked = [
        beam_params(4, n=4, max_tokens=60, ignore_eos=True),
        beam_params(6, n=6, num_beam_groups=3, diversity_penalty=0.7, max_tokens=40),
        beam_params(3, n=3, max_tokens=40),
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    ]
    jobs = [(prompt, params) for prompt in prompts for params in asked]
    runs = [run(engine, jobs), run(engine, jobs), run(engine, jobs, preempt_twice)]
    assert steps > 40
    cached = [output.num_cached_tokens for output in runs[1]]
    assert cached == [(len(prompt) - 1) // size * size for prompt, _ in jobs]
    without = run(engines(random_model(kind), enable_prefix_caching=False, **options), jobs)
    for found in runs:
        assert count_ties(found, without) <= MOST_TIES * sum(params.n for _, params in jobs)


def test_forks_copy_of_attentions_large_blocks_what_rows_do_not_have_in_common(
    engines: Engines, random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(random_model("granite4"), enable_prefix_caching=False)
    params, copied = beam_params(4, n=4, max_tokens=40, ignore_eos=True), list[list[int]]()
    (expected,) = engine.generate([prompt_of(20)], params)
    monkeypatch.setattr(kv_moves, "LARGE_BLOCK", 64)  # as large as those of so small a model
    kv, sizes = engine.runner.rows.kv, engine.runner.block_tables.block_sizes
    copy_parts = kv.copy_parts

    def counted(number: int, pairs: np.ndarray, tokens: np.ndarray) -> None:
        assert (tokens < sizes[number]).all()
        copied.extend(tokens.tolist())
        copy_parts(number, pairs, tokens)

    monkeypatch.setattr(kv, "copy_parts", counted)
    (found,) = engine.generate([prompt_of(20)], params)
    assert [one.token_ids for one in found.outputs] == [one.token_ids for one in expected.outputs]
    assert copied
    assert {first for first, _ in copied} == {20}, "the prompt is in every row's block"
    assert {end for _, end in copied} <= {*range(21, 59)}, "nobody goes on after the last step"
    monkeypatch.setattr(kv, "copy_parts", lambda *_: None)
    (found,) = engine.generate([prompt_of(20)], params)
    assert [one.token_ids for one in found.outputs] != [one.token_ids for one in expected.outputs]
