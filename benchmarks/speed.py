"""Time against plain sampling (the floor), vLLM's own `LLM.beam_search`, and transformers' `generate`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.common import TARGET, alternate, median_ratio
from benchmarks.stdlib_pair.corpus import held_out_prompts
from vllm_trie import beam_params

FLOOR_COLUMNS = ("beams", "sampling, s", "A/A", "n=b hypotheses", "n=1 hypothesis")
FLOOR_WIDTHS = (4, 8, 16)
FLOOR_PROMPTS, FLOOR_TOKENS = 8, 64

CLIENT_COLUMNS = ("beams x prompts x tokens", "vLLM's own loop, s", "in the engine, s", "times faster", "generate, s")
CLIENT_SHAPES = ((4, 1, 64), (8, 10, 100), (32, 4, 48), (128, 1, 16))

TRANSFORMERS_COLUMNS = ("beams x prompts x tokens", "transformers, s", "in the engine, s", "times faster")
TRANSFORMERS_SHAPE, TRANSFORMERS_BATCH = (8, 32, 32), 8


def against_sampling(llm: Any, repeats: int) -> Iterator[tuple[Any, ...]]:
    """Beams against plain sampling of as many sequences and tokens, with an A/A run of sampling beside it."""
    from vllm import SamplingParams

    prompts = held_out_prompts(FLOOR_PROMPTS)
    for width in FLOOR_WIDTHS:
        options = {"ignore_eos": True, "max_tokens": FLOOR_TOKENS}
        sampling = partial(llm.generate, prompts, SamplingParams(n=width, temperature=1.0, **options), use_tqdm=False)
        seconds = alternate(
            {
                "sampling": sampling,
                "all hypotheses": partial(
                    llm.generate, prompts, beam_params(width, n=width, **options), use_tqdm=False
                ),
                "sampling again": sampling,
                "best hypothesis": partial(llm.generate, prompts, beam_params(width, n=1, **options), use_tqdm=False),
            },
            repeats,
        )
        floor = seconds.pop("sampling")
        yield (
            width,
            statistics.median(floor),
            median_ratio(seconds["sampling again"], floor),
            median_ratio(seconds["all hypotheses"], floor),
            median_ratio(seconds["best hypothesis"], floor),
        )


def against_client_beams(llm: Any, repeats: int) -> Iterator[tuple[Any, ...]]:
    """`LLM.beam_search` in the engine against vLLM's own, which resubmits every beam at every token."""
    from vllm.sampling_params import BeamSearchParams

    from vllm_trie.entrypoints.beam_search import beam_search

    for width, num_prompts, tokens in CLIENT_SHAPES:
        prompts = held_out_prompts(num_prompts)
        as_dicts = [{"prompt": prompt} for prompt in prompts]
        params = BeamSearchParams(beam_width=width, max_tokens=tokens, ignore_eos=True)
        ours = beam_params(width, n=width, max_tokens=tokens, ignore_eos=True)
        seconds = alternate(
            {
                "client": partial(beam_search.original, llm, as_dicts, params),
                "engine": partial(llm.beam_search, as_dicts, params),
                "generate": partial(llm.generate, prompts, ours, use_tqdm=False),
            },
            repeats,
        )
        row = _row(f"{width} x {num_prompts} x {tokens}", seconds["client"], seconds["engine"])
        yield *row, statistics.median(seconds["generate"])


def against_transformers(llm: Any, repeats: int) -> Iterator[tuple[Any, ...]]:
    """Beams in the engine against `generate(num_beams=8)`.

    transformers gets prompts of similar length together, so that little of its work is padding.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    width, num_prompts, tokens = TRANSFORMERS_SHAPE
    tokenizer = AutoTokenizer.from_pretrained(TARGET, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    prompts = sorted(held_out_prompts(num_prompts), key=lambda prompt: len(tokenizer(prompt)["input_ids"]))
    batches = [
        tokenizer(prompts[i : i + TRANSFORMERS_BATCH], padding=True, return_tensors="pt", return_token_type_ids=False)
        for i in range(0, num_prompts, TRANSFORMERS_BATCH)
    ]

    def generate() -> None:
        for batch in batches:
            model.generate(**batch, num_beams=width, max_new_tokens=tokens, do_sample=False)

    ours = partial(llm.generate, prompts, beam_params(width, max_tokens=tokens), use_tqdm=False)
    seconds = alternate({"transformers": generate, "engine": ours}, repeats)
    yield _row(f"{width} x {num_prompts} x {tokens}", seconds["transformers"], seconds["engine"])


def _row(shape: str, theirs: list[float], ours: list[float]) -> tuple[Any, ...]:
    return shape, statistics.median(theirs), statistics.median(ours), median_ratio(theirs, ours)
