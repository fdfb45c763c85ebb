"""Beams of models with recurrent states, whose blocks lie over those of attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.engine import Engines
from tests.support.running import prompt_of
from vllm_trie import beam_params

pytestmark = pytest.mark.slow


def test_what_blocks_held_before_is_never_read(engines: Engines, random_model: Callable[[str], Path]) -> None:
    engine = engines(random_model("granite4"))
    prompts = [prompt_of(length, length) for length in (5, 62, 100)]
    params = beam_params(4, n=4, max_tokens=70, ignore_eos=True)
    expected = engine.generate(prompts, params)
    for cache in engine.runner.kv_caches:
        cache.view(torch.int8).fill_(-1)  # no numbers, whatever reads them
    found = engine.generate(prompts, params)
    for output, same in zip(found, expected, strict=True):
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in same.outputs]
