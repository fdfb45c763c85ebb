"""Every field that a beam request may have, at its bound and beyond: what one client may ask of all."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from vllm.sampling_params import StructuredOutputsParams

from vllm_trie.entrypoints.requests.limits import MOST_OPEN
from vllm_trie.options.parts import (
    MOST_DIVERSITY,
    MOST_NGRAM,
    MOST_PHRASE_CHARACTERS,
    MOST_PHRASE_TOKENS,
    MOST_PHRASES,
    MOST_SCALE,
    MOST_SEQUENCE_CHARACTERS,
    MOST_SEQUENCE_TOKENS,
    MOST_SEQUENCES,
    MOST_STOP_CHARACTERS,
    MOST_STOP_LENGTH,
    MOST_STOPS,
    MOST_STRING,
    MOST_WEIGHT,
    MOST_WIDTHS,
)
from vllm_trie.options.request import MOST_KEYS

WIDTH, MAX_TOKENS, ROWS, VOCAB = 4, 5, 64, 2048  # of requests that say nothing else, and of the engine
LARGE, HUGE = (1 << 63) - 1, 1 << 70
TINY, VAST = 5e-324, 1.7e308
LONG = "x" * 1_000_000


def score(candidates: Sequence[Any]) -> list[float]:
    return [-len(candidate.text) for candidate in candidates]


STEPS = {"unit": "step", "step_stop": ["\n"], "scorer": score, "candidates": 2, "max_steps": 1, "beam_width": 2}
SAMPLED = {"do_sample": True, "seed": 3}
GROUPS = {"num_beam_groups": 2, "diversity_penalty": 0.5}
ITEMS = {"allowed_sequences": [[5, 6], [7, 8], [9, 10]]}
RERANKED = {"rerank": "mbr"}
Cases = list[dict[str, Any]]


def each(name: str, *values: Any, **others: Any) -> Cases:
    return [{**others, name: value} for value in values]


def sets() -> Cases:
    size = MOST_SEQUENCE_TOKENS // MOST_SEQUENCES
    full = [[number % 2000 + 5, *[number // 2000 + 5] * (size - 1)] for number in range(MOST_SEQUENCES)]
    return [
        {"allowed_sequences": json.dumps(full), "max_tokens": size},
        {"allowed_sequences": json.dumps([*full, [5]])},
        {"allowed_sequences": json.dumps([[5] * (MOST_SEQUENCE_TOKENS + 1)])},
        {"allowed_sequences": ["x" * MOST_STRING] * (MOST_SEQUENCE_CHARACTERS // MOST_STRING)},
        {"allowed_sequences": ["x" * MOST_STRING] * (MOST_SEQUENCE_CHARACTERS // MOST_STRING + 1)},
        {"allowed_sequences": ["x" * (MOST_STRING + 1)]},
        *({"allowed_sequences": [[5] * length, [6]]} for length in (512, 513)),  # the engine's longest sequence, beyond
        {"allowed_sequences": f"[{LONG}]"},
        {"allowed_sequences": [[VOCAB]]},
    ]


def phrases() -> Cases:
    size = MOST_PHRASE_TOKENS // MOST_PHRASES
    full = [([20 + number % size] * size, MOST_WEIGHT) for number in range(MOST_PHRASES)]
    words = "self" * (MOST_PHRASE_CHARACTERS // 4)
    return [
        {"phrase_boosts": json.dumps(full)},
        {"phrase_boosts": [*full, ([5], 1.0)]},
        {"phrase_boosts": [([5] * (MOST_PHRASE_TOKENS + 1), 1.0)]},
        {"phrase_boosts": [(words, 1.0)]},
        {"phrase_boosts": [(words + "x", 1.0)]},
        {"phrase_boosts": [([5], VAST)]},
    ]


OF_OPTIONS: dict[str, Callable[[], Cases]] = {
    "beam_width": lambda: each("beam_width", ROWS, ROWS + 1, LARGE, HUGE, LONG),
    "early_stopping": lambda: each("early_stopping", True, "never", LONG),
    "unit": lambda: each("unit", LONG),
    "semantics": lambda: each("semantics", "vllm", "tridecode", LONG),
    "length_penalty": lambda: each("length_penalty", 5.99, -5.99, VAST, HUGE),
    "beam_widths": lambda: each("beam_widths", [WIDTH] * MOST_WIDTHS, [1] * (MOST_WIDTHS + 1), [LARGE], [LONG]),
    "num_beam_groups": lambda: each("num_beam_groups", WIDTH, LARGE, diversity_penalty=1.0),
    "diversity_penalty": lambda: each("diversity_penalty", MOST_DIVERSITY, VAST, HUGE, num_beam_groups=2),
    "prune_relative": lambda: each("prune_relative", TINY, 1, VAST),
    "prune_absolute": lambda: each("prune_absolute", 0, VAST),
    "prune_relative_local": lambda: each("prune_relative_local", TINY, 1),
    "max_candidates_per_parent": lambda: each("max_candidates_per_parent", 1, LARGE, HUGE),
    "phrase_boosts": phrases,
    "contrast": lambda: each("contrast", {"alpha": TINY, "beta": 1_000}, {LONG: 1}, LONG),
    "no_repeat_ngram_size": lambda: each("no_repeat_ngram_size", MOST_NGRAM, MOST_NGRAM + 1, LARGE),
    "compact": lambda: each("compact", True, LONG, n=1),
    "trace": lambda: each("trace", True, LONG),
    "beam_results": lambda: each("beam_results", True, LONG),
    "rerank": lambda: each("rerank", "mbr", LONG),
    "metric": lambda: each("metric", "chrf", LONG, **RERANKED),
    "rerank_scale": lambda: each("rerank_scale", MOST_SCALE, MOST_SCALE + 1, **RERANKED),
    "rerank_confidence": lambda: each("rerank_confidence", 1 - 1e-9, 1, **RERANKED),
    "do_sample": lambda: each("do_sample", True, LONG),
    "replacement": lambda: each("replacement", True, LONG, **SAMPLED),
    "stochastic": lambda: each("stochastic", True, LONG, **SAMPLED),
    "sample_first": lambda: each("sample_first", MAX_TOKENS, MAX_TOKENS + 1, LARGE),
    "catalog": lambda: each("catalog", "x" * 256, LONG),
    "allowed_sequences": sets,
    "catalog_items": lambda: each("catalog_items", 2, LARGE, HUGE, **ITEMS),
    "catalog_after": lambda: each("catalog_after", 20, LARGE, LONG, **ITEMS),
    "catalog_stop": lambda: each("catalog_stop", True, LONG, **ITEMS),
    "catalog_renormalize": lambda: each("catalog_renormalize", True, LONG, **ITEMS),
    "catalog_unique": lambda: each("catalog_unique", True, LONG, **ITEMS),
    "exclude_items": lambda: each("exclude_items", [1], [HUGE], [LONG], [1] * 100_001, catalog="x"),
    "exclude_list": lambda: each("exclude_list", "x" * 256, LONG, catalog="x"),
    "step_stop": lambda: each("step_stop", ["\n" * 64] * MOST_STOPS, ["a"] * (MOST_STOPS + 1), [LONG], **STEPS),
    "scorer": lambda: each("scorer", LONG, [LONG], **STEPS),
    "candidates": lambda: each("candidates", 16 * ROWS // 2, 16 * ROWS, LARGE, **{**STEPS, "max_tokens": 1}),
    "max_steps": lambda: each("max_steps", LARGE, HUGE, **STEPS),
    "allot": lambda: each("allot", "rebase", "dvts", LONG, **STEPS),
    "allot_temperature": lambda: each("allot_temperature", TINY, VAST, **STEPS, allot="rebase"),
    "prefer_shared": lambda: each("prefer_shared", VAST, **STEPS, allot="rebase"),
    "order": lambda: [
        *each("order", "best", "mcts", LONG, **STEPS),
        {**STEPS, "max_steps": MOST_OPEN // 4 + 1, "order": "best"},
    ],
    "exploration": lambda: each("exploration", VAST, **STEPS, order="mcts"),
    "pool": lambda: each("pool", LARGE, HUGE, **STEPS, order="best"),
    "lookahead": lambda: each("lookahead", LARGE, HUGE, **STEPS),
    "speculation": lambda: each("speculation", "exact", LONG),
    "draft_width": lambda: each("draft_width", LARGE, HUGE),
    "memory_mode": lambda: each("memory_mode", True, LONG),
    "min_width": lambda: each("min_width", LARGE, **SAMPLED, threshold=0.5),
    "threshold": lambda: each("threshold", TINY, VAST, **SAMPLED),
    "accept": lambda: each("accept", "top_k", LONG, **SAMPLED),
    "accept_top_k": lambda: each("accept_top_k", LARGE, **SAMPLED, accept="top_k"),
}
OF_FIELDS: dict[str, Callable[[], Cases]] = {
    "n": lambda: each("n", WIDTH, WIDTH + 1, 16_384),
    "max_tokens": lambda: each("max_tokens", 1, None, 1 << 40, stop_token_ids=[*range(VOCAB)]),
    "min_tokens": lambda: [
        *each("min_tokens", MAX_TOKENS, MAX_TOKENS + 1, LARGE),
    ],
    "stop": lambda: each(
        *("stop", ["\n" * (MOST_STOP_CHARACTERS // MOST_STOPS)] * MOST_STOPS),
        *(["e" * 63 + chr(97 + number % 26) for number in range(MOST_STOPS)], ["e" * 256] * 16),
        *(["a"] * (MOST_STOPS + 1), ["e" * (MOST_STOP_LENGTH + 1)], ["e" * 256] * 17, [LONG]),
    ),
    "stop_token_ids": lambda: [
        *each("stop_token_ids", [*range(VOCAB)], [*range(VOCAB)] * 100),
        *({"stop_token_ids": [*range(number)], "min_tokens": 2} for number in (127, 129)),
    ],
    "ignore_eos": lambda: each("ignore_eos", True),
    "presence_penalty": lambda: each("presence_penalty", 2.0, VAST),
    "frequency_penalty": lambda: each("frequency_penalty", 2.0, VAST),
    "repetition_penalty": lambda: each("repetition_penalty", TINY, VAST),
    "logit_bias": lambda: each("logit_bias", *(dict.fromkeys(range(size), 1.0) for size in (1024, 1025))),
    "allowed_token_ids": lambda: each("allowed_token_ids", [*range(1024)], [*range(1025)], [5] * 100_000),
    "bad_words": lambda: each("bad_words", [f"word{number}" for number in range(60)], ["a"] * 9999, [LONG[:9999]]),
    "temperature": lambda: each("temperature", TINY, 2.0, VAST),
    "min_p": lambda: each("min_p", TINY, 1.0),
    "top_k": lambda: each("top_k", 1, LARGE),
    "top_p": lambda: each("top_p", TINY, 1.0),
    "seed": lambda: each("seed", LARGE, -(1 << 63), do_sample=True),
    "logprobs": lambda: each("logprobs", 20, 21, LARGE, -1),
    "flat_logprobs": lambda: each("flat_logprobs", True, logprobs=20),
    "detokenize": lambda: each("detokenize", False),
    "skip_special_tokens": lambda: each("skip_special_tokens", False, stop=["e"]),
    "spaces_between_special_tokens": lambda: each("spaces_between_special_tokens", False, stop=["e"]),
    "include_stop_str_in_output": lambda: each("include_stop_str_in_output", True, stop=["e"]),
    "structured_outputs": lambda: each(
        "structured_outputs",
        StructuredOutputsParams(regex="[a-z]{1,500}"),
        StructuredOutputsParams(choice=[f"choice {number}" for number in range(300)]),
        ignore_eos=False,
    ),
    "extra_args": lambda: [{f"key{number}": LONG for number in range(MOST_KEYS)}, {LONG: 1}, {"beam_widht": LONG}],
    "skip_reading_prefix_cache": lambda: each("skip_reading_prefix_cache", True),
    "output_kind": lambda: [],  # of few values
    "stream_interval": lambda: each("stream_interval", LARGE),
}
