"""What each control costs: time of beam search with it against beam search without."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.common import alternate, median_ratio
from benchmarks.stdlib_pair.corpus import held_out_prompts
from vllm_trie import beam_params

COLUMNS = ("with", "s", "times plain beams")
PROMPTS, WIDTH, TOKENS = 4, 8, 48
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


def against_plain_beams(llm: Any, repeats: int) -> Iterator[tuple[Any, ...]]:
    """Each control by itself, alternating with plain beams."""
    prompts = held_out_prompts(PROMPTS)
    options = {"n": WIDTH, "max_tokens": TOKENS, "ignore_eos": True}
    plain = partial(llm.generate, prompts, beam_params(WIDTH, **options), use_tqdm=False)
    for name, control in CONTROLS.items():
        controlled = partial(llm.generate, prompts, beam_params(WIDTH, **options, **control), use_tqdm=False)
        seconds = alternate({"plain": plain, "controlled": controlled}, repeats)
        ratio = median_ratio(seconds["controlled"], seconds["plain"])
        yield name, statistics.median(seconds["controlled"]), ratio
