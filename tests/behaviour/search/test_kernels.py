"""A whole search through the kernels finds what it finds through their references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from vllm import SamplingParams

from tests.support.engine import BLOCK_SIZE, Engines
from tests.support.reference import agree, engine_answers, transformers_beams
from vllm_trie import beam_params
from vllm_trie.worker import kernels

pytestmark = pytest.mark.slow

MAX_TOKENS = 10  # from a partly filled block over its end into the next
WIDTHS = (3, 2)


@pytest.mark.parametrize("kind", ["gqa", "gemma2"])
def test_search_through_kernels_finds_the_beams_of_transformers(
    engines: Engines, random_model: Callable, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model = random_model(kind)
    prompts = [list(range(2, 2 + BLOCK_SIZE - 4 + at)) for at in range(len(WIDTHS))]
    params = [beam_params(width, n=width, max_tokens=MAX_TOKENS) for width in WIDTHS]
    launched = []

    def run_on(device: torch.device) -> bool:
        launched.append(device)
        return True

    monkeypatch.setattr(kernels, "run_on", run_on)
    outputs = engines(model).generate(
        [*prompts, prompts[0]], [*params, SamplingParams(temperature=0, max_tokens=MAX_TOKENS)]
    )
    assert launched
    for prompt, width, output in zip(prompts, WIDTHS, outputs, strict=False):
        theirs = transformers_beams(model, prompt, width, width, MAX_TOKENS, length_penalty=1.0, eos_token_id=1)
        assert agree(engine_answers(output, 1.0), theirs)
