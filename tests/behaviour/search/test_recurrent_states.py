"""Beams of models with recurrent states, whose blocks lie over those of attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.engine import Engines
from tests.support.running import prompt_of
from vllm_trie import beam_params
from vllm_trie.worker import reorder

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("caching", [False, True])
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


def test_forks_copy_the_filled_part_of_attentions_large_blocks(
    engines: Engines, random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(random_model("granite4"))
    params, counts = beam_params(4, n=4, max_tokens=40, ignore_eos=True), list[int]()
    (expected,) = engine.generate([prompt_of(20)], params)
    monkeypatch.setattr(reorder, "LARGE_BLOCK", 64)  # as large as those of so small a model
    slots, sizes = engine.runner.rows.kv_slots, engine.runner.block_tables.block_sizes
    copy_first = slots.copy_first

    def counted(number: int, sources: torch.Tensor, destinations: torch.Tensor, filled: torch.Tensor) -> None:
        assert (filled < sizes[number]).all()
        counts.extend(filled.tolist())
        copy_first(number, sources, destinations, filled)

    monkeypatch.setattr(slots, "copy_first", counted)
    (found,) = engine.generate([prompt_of(20)], params)
    assert [one.token_ids for one in found.outputs] == [one.token_ids for one in expected.outputs]
    assert counts
    assert set(counts) <= {*range(21, 60)}
    monkeypatch.setattr(slots, "copy_first", lambda *_: None)
    (found,) = engine.generate([prompt_of(20)], params)
    assert [one.token_ids for one in found.outputs] != [one.token_ids for one in expected.outputs]
