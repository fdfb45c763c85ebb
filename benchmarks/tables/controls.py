"""What each control costs: time of beam search with it against beam search without."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.common import alternate, generate
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.significance import paired, shown_p
from vllm_trie import beam_params

WIDTH, PROMPTS = 8, 4
CONTROLS: dict[str, dict[str, Any]] = {
    "nothing (A/A)": {},
    "logprobs=4": {"logprobs": 4},
    "a penalty": {"frequency_penalty": 0.3},
    "logit_bias": {"logit_bias": {30: 1.0}},
    "allowed_token_ids, half of them": {"allowed_token_ids": list(range(0, 2048, 2))},
    "bad_words": {"bad_words": ["self", "return None"]},
    "temperature": {"temperature": 1.3},
    "top_k, min_p": {"top_k": 20, "min_p": 0.01},
    "top_p": {"top_p": 0.9},
    "a stop string that never comes": {"stop": ["<|never|>"]},
    "pruning": {"prune_relative": 0.001, "max_candidates_per_parent": 4},
    "sample_first=8": {"sample_first": 8, "seed": 1},
    'semantics="vllm"': {"semantics": "vllm"},
    'semantics="tridecode"': {"semantics": "tridecode"},
}


def cells(setting: Setting) -> list[Cell]:
    return [(name,) for name in [*CONTROLS][: setting.pick(2, 14, 14)]]


def measure(bench: Bench, name: str) -> Measured:
    """One control by itself, alternating with plain beams."""
    llm = bench.engine()
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in bench.prompts(PROMPTS)]
    options = {"n": WIDTH, "max_tokens": bench.setting.pick(4, 48, 48), "ignore_eos": True}
    runs = {
        which: lambda more=more: generate(llm, prompts, beam_params(WIDTH, **options, **more))
        for which, more in {"plain": {}, "controlled": CONTROLS[name]}.items()
    }
    seconds = alternate(runs, bench.setting.pick(2, 5, 9))
    pairs = paired(seconds["controlled"], seconds["plain"])
    return Measured([(name, statistics.median(seconds["controlled"]), str(pairs.ratio), pairs.n, shown_p(pairs.p))])


TABLE = Table(
    f"Cost of controls, {PROMPTS} prompts x {WIDTH} beams",
    ("with", "s", "times plain beams (95 %)", "n", "p"),
    cells,
    measure,
    "each alternates with plain beams; p: paired t-test of log seconds over alternations",
)
