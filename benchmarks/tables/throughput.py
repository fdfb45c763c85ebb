"""Tokens per second, one prompt at a time, against every peer: the trie paper's speed columns, one beam among them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks import models
from benchmarks.common import generate, timed
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.peers.tridecode import PublishedTrieSearch
from benchmarks.significance import interval, paired, shown_p
from vllm_trie import beam_params
from vllm_trie.entrypoints.llm import llm_beam_search

OURS = "beams in the engine"
CLIENT_LOOP = "vLLM's LLM.beam_search"
TRANSFORMERS = "transformers generate"
SAMPLING = "vLLM sampling, n=b"
CTRANSLATE2 = "CTranslate2"
PUBLISHED = "trie paper's algorithm"
GREEDY = "vLLM greedy"


def cells(setting: Setting) -> list[Cell]:
    return setting.cells_by_prompt_and_width(
        num_variants=setting.pick(1, 1, 3),
        lengths=setting.pick((None,), (None,), (None, 256)),
        widths=setting.pick((1, 3), (1, 3, 15), (1, 3, 6, 9, 15)),
    )


def measure(bench: Bench, variant: str, set_name: str, length: int | None, width: int) -> Measured:
    """All peers in turn on each prompt; the first prompt is their warm-up."""
    setting = bench.setting
    num_tokens = setting.max_tokens or setting.pick(8, 24, 24)
    llm = bench.engine(variant)
    warm_up, *prompts = bench.prompts(1 + setting.pick(2, 3, 4), length, setting.prompt_set(set_name))
    runs = searches(bench, variant, width, num_tokens)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for prompt in (warm_up, *prompts):
        for name, run in runs.items():
            llm.reset_prefix_cache()
            seconds[name].append(timed(lambda run=run, prompt=prompt: run([prompt])))
    rows = []
    for name, (_, *own) in seconds.items():
        pairs = paired(own, seconds[OURS][1:])
        rows.append(
            (
                models.attention_of(bench.model(variant), models.AS_IT_IS),
                set_name,
                f"{statistics.fmean(map(len, prompts)):.0f}",
                width,
                name,
                str(interval([num_tokens / one for one in own])),
                "" if name == OURS else str(pairs.ratio),
                pairs.n,
                "" if name == OURS else shown_p(pairs.p),
            )
        )
    return Measured(rows, {f"tokens/s, {name}": [num_tokens / one for one in own[1:]] for name, own in seconds.items()})


Search = Callable[[list[list[int]]], Any]


def searches(bench: Bench, variant: str, width: int, num_tokens: int) -> dict[str, Search]:
    """What finds answers of `num_tokens` tokens to prompts of one length, by name."""
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import BeamSearchParams

    llm, reference = bench.engine(variant), bench.reference(variant)
    options: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True}

    def as_dicts(prompts: list[list[int]]) -> list[dict[str, Any]]:
        return [{"prompt_token_ids": prompt} for prompt in prompts]

    def by_vllm(params: Any) -> Search:
        return lambda prompts: generate(llm, as_dicts(prompts), params)

    def client_loop(prompts: list[list[int]]) -> Any:
        params = BeamSearchParams(beam_width=width, max_tokens=num_tokens, ignore_eos=True)
        return llm_beam_search.original(llm, as_dicts(prompts), params)

    def transformers(prompts: list[list[int]]) -> Any:
        ids = torch.tensor(prompts, device=reference.device)
        with torch.inference_mode():
            return reference.generate(
                ids, attention_mask=torch.ones_like(ids), num_beams=width, max_new_tokens=num_tokens, do_sample=False
            )

    found: dict[str, Search] = {
        OURS: by_vllm(beam_params(width, n=width, **options)),
        CLIENT_LOOP: client_loop,
        TRANSFORMERS: transformers,
    }
    try:
        engine = bench.ctranslate2(variant)
    except ValueError as error:
        bench.say_once(f"{CTRANSLATE2} is left out: {error}")
    else:
        found[CTRANSLATE2] = lambda prompts: engine.search(prompts, width, num_tokens)
    try:
        published = PublishedTrieSearch(reference)
    except ValueError as error:
        bench.say_once(f"{PUBLISHED} is left out: {error}")
    else:
        found[PUBLISHED] = lambda prompts: [published.search(prompt, width, num_tokens, None) for prompt in prompts]
    return found | {
        SAMPLING: by_vllm(SamplingParams(n=width, temperature=1.0, **options)),
        GREEDY: by_vllm(SamplingParams(temperature=0.0, **options)),
    }


TABLE = Table(
    "Tokens per second, one prompt at a time",
    ("attention", "prompts", "prompt tokens", "beams", "search", "tokens/s (95 %)", "times our time (95 %)", "n", "p"),
    cells,
    measure,
    "tokens of the best answer over the whole call, prompt included; all of vLLM's return b answers, transformers, "
    "CTranslate2 (in float32, whatever the others have) and the trie paper's algorithm (flat trie, dense mask, "
    "reclamation every 15 steps) the best one; the peers take turns on every prompt; times: geometric mean of ratios; "
    "p: paired t-test of log seconds; EOS ignored; one beam is greedy search, by the engine's beams and without them",
)
