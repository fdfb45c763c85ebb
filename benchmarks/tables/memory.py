"""KV memory with the trie and without, by attention, width and prompt: the trie paper's memory columns.

Its Table 4, the overlap, is a column here and a page of its own: see `benchmarks.report`.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import models
from benchmarks.common import BLOCK_SIZE
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.significance import interval, paired, shown_p
from benchmarks.watch import manager_of, watched
from vllm_trie import beam_params


def cells(setting: Setting) -> list[Cell]:
    return setting.cells_by_prompt_and_width(
        num_variants=setting.pick(1, 3, 3),
        lengths=setting.pick((None,), (None, 256), (None, 256, 512)),
        widths=setting.pick((3,), (3, 15), (3, 6, 9, 15)),
    )


def measure(bench: Bench, variant: str, set_name: str, length: int | None, width: int) -> Measured:
    """Peaks of the same prompts, one at a time, searched and then sampled with nothing shared."""
    from vllm import SamplingParams

    setting = bench.setting
    num_tokens = setting.max_tokens or setting.pick(16, 48, 64)
    options: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True}
    llm = bench.engine(variant, enable_prefix_caching=False)
    prompts = bench.prompts(setting.pick(2, 3, 5), length, setting.prompt_set(set_name))
    shared = [watched(llm, prompt, beam_params(width, **options), width).used for prompt in prompts]
    sampling = SamplingParams(n=width, temperature=1.0, **options)
    unshared = [watched(llm, prompt, sampling, width).used for prompt in prompts]
    peaks, unshared_peaks = [float(max(used)) for used in shared], [float(max(used)) for used in unshared]
    overlaps = [
        statistics.fmean(1 - a / b for a, b in zip(ours, theirs, strict=False))
        for ours, theirs in zip(shared, unshared, strict=True)
    ]
    kib_by_prompt = [_block_bytes(llm) / 1024 / (len(prompt) + num_tokens) for prompt in prompts]
    pairs = paired(peaks, unshared_peaks)
    row = (
        models.attention_of(bench.model(variant), models.AS_IT_IS),
        set_name,
        length or f"{statistics.fmean(map(len, prompts)):.0f} on average",
        width,
        _mean_product(peaks, kib_by_prompt),
        _mean_product(unshared_peaks, kib_by_prompt),
        str(interval([a / b for a, b in zip(peaks, unshared_peaks, strict=True)])),
        statistics.fmean(overlaps),
        pairs.n,
        shown_p(pairs.p),
    )
    return Measured([row], {"shared": _mean_by_step(shared), "unshared": _mean_by_step(unshared), "overlap": overlaps})


def _mean_product(peaks: list[float], weights: list[float]) -> float:
    return statistics.fmean(peak * weight for peak, weight in zip(peaks, weights, strict=True))


def _block_bytes(llm: Any) -> int:
    """Of one KV block, all layers of all KV cache groups that a token's block spans."""
    manager = manager_of(llm)
    groups = manager.kv_cache_config.kv_cache_groups
    return sum(group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in groups) // len(groups)


def _mean_by_step(by_prompt: list[list[int]]) -> list[float]:
    return [statistics.fmean(step) for step in zip(*by_prompt, strict=False)]


TABLE = Table(
    "KV memory, shared and not",
    (
        "attention",
        "prompts",
        "prompt tokens",
        "beams",
        "shared, KiB per token",
        "unshared, KiB per token",
        "M_T/M_B (95 %)",
        "overlap",
        "n",
        "p",
    ),
    cells,
    measure,
    f"peak KV blocks of {BLOCK_SIZE} tokens in use, one prompt at a time, prefix caching off; unshared: as many "
    "sequences, sampled, which share nothing; per token: of prompt and answer, as in the trie paper; M_T/M_B: mean "
    "ratio of peaks; overlap: share of unshared blocks that sharing saves, mean over steps; p: paired t-test of log "
    "peaks, where they vary",
)
