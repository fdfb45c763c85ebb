"""Beams of every kind of model are those of transformers: windows, two KV cache groups, experts, LoRA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.sampling_params import BeamSearchParams

from benchmarks.architectures.gated_delta import float32_attention
from tests.support import models
from tests.support.engine import BLOCK_SIZE, TRAINED_TARGET, Engines
from tests.support.reference import (
    Answer,
    agree,
    engine_answers,
    transformers_beams,
    transformers_beams_of_all,
    transformers_greedy,
    transformers_one_beam,
)
from tests.support.running import prompt_of
from tests.support.sweep import sweep
from vllm_trie import beam_params
from vllm_trie.entrypoints.llm import llm_beam_search

pytestmark = pytest.mark.slow

MAX_TOKENS = 70  # crosses two block boundaries, and leaves the first block's window
LENGTHS = (5, BLOCK_SIZE - 1, models.WINDOW + 50)
ELSEWHERE = ("gqa", "mha", "toy")  # test_parity.py, test_beam_sampling.py
KINDS = [kind for kind in (*models.KINDS, *models.OF_TABLE) if kind not in ELSEWHERE]
# Windows, experts, states and attention, gated delta rules, latent attention.
EACH_TIME = ("mistral", "mixtral", "granite4", "qwen3_5", "deepseek_v2")
MOST_TIES = 0.02


@pytest.mark.parametrize("kind", sweep(KINDS, *EACH_TIME))
def test_answers_are_those_of_transformers(
    engines: Engines, random_model: Callable[[str], Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(kind)
    options = {}
    if kind in models.OF_TABLE:
        options = models.OF_TABLE[kind].engine
        if models.OF_TABLE[kind].twin:
            monkeypatch.setattr(gdn_attention, "cpu_gdn_attention_core", float32_attention)
    engine = engines(model, max_num_batched_tokens=64, **options)
    engine.watched.restart()
    cases = [(length, width) for length in LENGTHS for width in (1, 2, 5)]
    jobs = [(prompt_of(length, length), width, number % 2 == 0) for number, (length, width) in enumerate(cases)]
    params = [beam_params(width, n=width, max_tokens=MAX_TOKENS, ignore_eos=ignore) for _, width, ignore in jobs]
    outputs = engine.generate([prompt for prompt, _, _ in jobs], params)
    found: dict[tuple[int, bool], list[tuple[list[int], list[Answer]]]] = {}
    for (prompt, *options), output in zip(jobs, outputs, strict=True):
        found.setdefault(tuple(options), []).append((prompt, engine_answers(output, 1.0)))
    num_tied = 0
    for (width, ignore_eos), alike in found.items():
        theirs = transformers_beams_of(model, width, None if ignore_eos else 1, alike)
        num_tied += sum(not agree(ours, their) for (_, ours), their in zip(alike, theirs, strict=True))
    assert num_tied <= MOST_TIES * len(jobs)
    assert engine.watched.num_compared > 0


def transformers_beams_of(
    model: Path, width: int, eos: int | None, alike: list[tuple[list[int], list[Answer]]]
) -> list[list[Answer]]:
    """What transformers answers to prompts; beside each of them, what is likely."""
    if width > 1:
        prompts = [prompt for prompt, _ in alike]
        return transformers_beams_of_all(model, prompts, width, width, MAX_TOKENS, eos_token_id=eos)
    return [transformers_one_beam(model, prompt, ours[0].token_ids, MAX_TOKENS, eos=eos) for prompt, ours in alike]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, random_model: Callable[[str], Path]) -> list[tuple[Any, Path]]:
    """Two LoRA adapters, and the models they make."""
    folder = tmp_path_factory.mktemp("adapters")
    found = []
    for number in (1, 2):
        adapter, merged = folder / f"adapter{number}", folder / f"merged{number}"
        models.make_adapter(random_model("gqa"), adapter, merged, seed=number)
        found.append((LoRARequest(f"adapter{number}", number, str(adapter)), merged))
    return found


def test_beams_under_an_adapter_are_those_of_the_merged_model(
    engines: Engines, random_model: Callable[[str], Path], adapters: list[tuple[Any, Path]]
) -> None:
    base = random_model("gqa")
    engine = engines(base, enable_lora=True, max_loras=2, max_lora_rank=8)
    # Without the base model: vLLM's CPU kernels answer its requests by an adapter's weights if one is in the batch.
    jobs = [(adapter, model, width) for adapter, model in adapters for width in (1, 5)]
    prompt = prompt_of(40)
    params = [beam_params(width, n=width, max_tokens=MAX_TOKENS, ignore_eos=True) for _, _, width in jobs]
    prompts: Any = [{"prompt_token_ids": prompt}] * len(jobs)
    outputs = engine.llm.generate(prompts, params, lora_request=[adapter for adapter, _, _ in jobs], use_tqdm=False)
    for (_, model, width), output in zip(jobs, outputs, strict=True):
        theirs = transformers_beams(model, prompt, width, width, MAX_TOKENS, eos_token_id=None)
        assert agree(engine_answers(output, 1.0), theirs)
    adapter, merged = adapters[0]
    (greedy,) = engine.llm.generate(
        prompts[:1], SamplingParams(temperature=0, max_tokens=9), lora_request=adapter, use_tqdm=False
    )
    assert [*greedy.outputs[0].token_ids] == transformers_greedy(merged, prompt, 9), "adapters are mixed up"


def test_llm_beam_search_takes_adapters_as_vllms_own(engines: Engines, tmp_path: Path) -> None:
    models.make_adapter(TRAINED_TARGET, tmp_path / "adapter", tmp_path / "merged", seed=3)
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    llm = engines(TRAINED_TARGET, enable_lora=True, max_lora_rank=8).llm
    prompts, params = [{"prompt": text} for text in ("def f(", "import ")], BeamSearchParams(4, max_tokens=12)
    ours, theirs = llm.beam_search(prompts, params, adapter), llm_beam_search.original(llm, prompts, params, adapter)
    bare = llm.beam_search(prompts, params)
    for our, their, other in zip(ours, theirs, bare, strict=True):
        assert [sequence.tokens for sequence in our.sequences] == [sequence.tokens for sequence in their.sequences]
        assert [sequence.tokens for sequence in our.sequences] != [sequence.tokens for sequence in other.sequences]
        assert {sequence.lora_request for sequence in our.sequences} == {adapter}
