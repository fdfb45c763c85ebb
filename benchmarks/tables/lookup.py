"""Drafts without a draft model, where an answer repeats the prompt: steps per forward, and time against plain beams.

A prompt is a stretch of code twice, the second time cut in the middle. The shipped models are too small to copy, so one
made by hand does it (`benchmarks.copying`); another model is measured as it is. What counts are prompts that it copies.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import models
from benchmarks.common import alternate, generate, median_ratio, one_at_a_time
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.significance import paired
from benchmarks.watch import same_answers, total_counts
from vllm_trie import beam_params

NUM_LAYERS, NGRAMS = 4, (1, 4)
STRETCH = 96  # tokens
COPIES = 0.75  # share of an answer's tokens that must be the stretch's
CANDIDATES = 6  # of prompts, for each that is measured


def cells(setting: Setting) -> list[Cell]:
    is_shipped = setting.is_toy
    deeper = setting.pick((), (), (8,)) if is_shipped else ()
    variants = [models.COPIES if is_shipped else models.AS_IT_IS, *(f"{models.COPIES}, {n}x deeper" for n in deeper)]
    widths = setting.widths or setting.pick((4,), (1, 4), (1, 2, 4, 8))
    return [(variant, width) for variant in variants for width in widths]


def measure(bench: Bench, variant: str, width: int) -> Measured:
    """Searches one at a time, plain and with n-grams in turn, on the same engine."""
    setting = bench.setting
    config = {"method": "ngram", "num_speculative_tokens": NUM_LAYERS}
    config |= {"prompt_lookup_min": NGRAMS[0], "prompt_lookup_max": NGRAMS[1]}
    llm = bench.engine(variant, speculative_config=config)
    num_tokens = min(setting.max_tokens or setting.pick(8, 40, 40), STRETCH // 2)
    prompts, found = edits(bench, llm, setting.pick(1, 4, 12), num_tokens)
    options = {"max_tokens": num_tokens, "ignore_eos": True}
    own = {
        "plain": beam_params(width, speculation="off", **options),
        "n-grams": beam_params(width, speculation="exact", **options),
    }
    runs: dict[str, Callable[[], Any]] = {
        name: partial(one_at_a_time, llm, prompts, params) for name, params in own.items()
    }
    outputs = {name: run() for name, run in runs.items()}
    same = same_answers(outputs["n-grams"], outputs["plain"], setting.dtype)
    counts = total_counts(outputs["n-grams"])
    seconds = alternate(runs, setting.repeats)
    row = (
        variant,
        width,
        counts.steps_per_forward,
        counts.accepted / max(counts.drafted, 1),
        1000 * statistics.median(seconds["plain"]) / counts.steps,
        1000 * statistics.median(seconds["n-grams"]) / counts.steps,
        median_ratio(seconds["plain"], seconds["n-grams"]),
        str(paired(seconds["plain"], seconds["n-grams"]).ratio),
        f"{len(prompts)} of {found}",
        same,
    )
    return Measured([row])


def edits(bench: Bench, llm: Any, count: int, num_tokens: int) -> tuple[list[Any], int]:
    """Prompts on which the model, searching greedily, copies; and of how many they are the first."""
    stretches = bench.prompts(CANDIDATES * count, STRETCH)
    num_first = len(llm.get_tokenizer()("")["input_ids"])
    prompts, num_seen = [], 0
    greedy = beam_params(1, max_tokens=num_tokens, ignore_eos=True, speculation="off")
    for stretch in stretches:
        code = stretch[num_first:]
        prompt = {"prompt_token_ids": [*stretch, *code[: len(code) // 2]]}
        (output,) = generate(llm, [prompt], greedy)
        expected, num_seen = code[len(code) // 2 :][:num_tokens], num_seen + 1
        pairs = zip(output.outputs[0].token_ids, expected, strict=False)
        if sum(ours == theirs for ours, theirs in pairs) >= COPIES * len(expected):
            prompts.append(prompt)
        if len(prompts) == count:
            break
    if not prompts:
        raise RuntimeError(f"the model copies none of {num_seen} stretches of {STRETCH} tokens")
    return prompts, num_seen


TABLE = Table(
    "Drafts by n-grams, where answers repeat the prompt",
    (
        "model",
        "beams",
        "steps per forward",
        "accepted of drafted",
        "ms per step, plain",
        "ms per step, n-grams",
        "times as fast",
        "by pair (95 %)",
        "prompts",
        "same answers",
    ),
    cells,
    measure,
    f"layers={NUM_LAYERS}, n-grams of {NGRAMS[0]} to {NGRAMS[1]} tokens; {STRETCH} tokens of code twice, cut in the "
    "middle of the second time; prompts: the first on which the model copies, of so many; one search at a time, whole "
    "calls, in turn, medians; the prompt's forward counts in the time and not in the steps per forward",
)
