"""The one table of what searches may ask for, which every test that goes through all options takes from here."""

from __future__ import annotations

from typing import Any

ITEMS = [[1 + number % 5, 7 + number % 29, *range(9, 9 + number % 3), 40 + number % 97] for number in range(300)]
NEEDS_TEXT = ("stop", "bad_words")  # and so a tokenizer
OPTIONS: list[dict[str, Any]] = [
    {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "logprobs": 3},
    {"presence_penalty": -0.4, "frequency_penalty": -0.3, "repetition_penalty": 0.9, "min_tokens": 5},
    {"bad_words": ["self", " return"], "stop": ["\n\n", "):"], "min_tokens": 6},
    {"stop": ["self.", "f(x", "t(s", "e("], "include_stop_str_in_output": True, "early_stopping": True},
    {"stop": list(" estia_(.rn"), "logprobs": 1},
    {"allowed_token_ids": [*range(1, 300)], "stop_token_ids": [13, 15], "early_stopping": "never"},
    {"allowed_token_ids": [1, 7, 8, 9], "logprobs": 0},
    {"allowed_token_ids": [9], "ignore_eos": True},
    {"temperature": 1.7, "top_k": 12, "top_p": 0.8},
    {"temperature": 0.6, "logprobs": 2},
    {"min_p": 0.05, "logit_bias": {7: 2.0, 30: -3.0}},
    {"min_p": 0.2, "logprobs": 1, "frequency_penalty": 0.5, "ignore_eos": True},
    {"top_k": 1},
    {"prune_relative": 0.05, "max_candidates_per_parent": 2, "length_penalty": 0.3},
    {"prune_absolute": 1.5, "prune_relative_local": 0.3, "ignore_eos": True},
    {"max_candidates_per_parent": 1, "ignore_eos": True},
    {"sample_first": 9, "seed": 5, "temperature": 0.9, "logprobs": 2},
    {"semantics": "vllm", "length_penalty": 2.0, "logprobs": 2},
    {"semantics": "vllm", "length_penalty": 0.5, "ignore_eos": True, "frequency_penalty": 0.6},
    {"semantics": "tridecode", "min_tokens": 3},
    {"early_stopping": True, "length_penalty": -1.0, "ignore_eos": True, "stop_token_ids": [1, 13]},
    {"early_stopping": "never", "length_penalty": 2.0, "min_tokens": 12},
    {"max_tokens": 1, "logprobs": 2},
    {"max_tokens": 2, "ignore_eos": True},
    {"max_tokens": 3, "ignore_eos": True, "stop_token_ids": [13]},
    {"n": 1},
    {"no_repeat_ngram_size": 1, "logprobs": 2},
    {"no_repeat_ngram_size": 2, "frequency_penalty": 0.4, "ignore_eos": True},
    {"no_repeat_ngram_size": 3, "semantics": "vllm", "logprobs": 1},
    {"phrase_boosts": [([7, 8], 3.0), ([[30], [13, 9]], 1.5), ([8], -2.0)], "logprobs": 2},
    {"phrase_boosts": [([7], 1.0), ([15, 7, 7], -4.0)], "semantics": "vllm", "ignore_eos": True},
    {"num_beam_groups": 2, "diversity_penalty": 0.4, "beam_width": 4, "n": 3, "logprobs": 1},
    {"num_beam_groups": 2, "diversity_penalty": 1.0, "beam_width": 4, "n": 4, "stop": ["self", "("], "min_p": 0.01},
    {"num_beam_groups": 2, "diversity_penalty": 0.7, "beam_width": 4, "n": 4, "allowed_sequences": ITEMS},
    {"beam_widths": [2, 5, 3], "beam_width": 5, "n": 3},
    {"beam_widths": [5, 1, 4, 2], "beam_width": 5, "n": 2, "ignore_eos": True, "logprobs": 1},
    {"allowed_sequences": ITEMS, "logprobs": 2},
    {"allowed_sequences": [*ITEMS, *(item[:2] for item in ITEMS[::7])], "catalog_stop": True, "temperature": 0.8},
    {"allowed_sequences": ITEMS, "catalog_items": 3, "catalog_renormalize": True, "length_penalty": 0.0},
    {"allowed_sequences": ITEMS, "catalog_after": 13, "early_stopping": True},
    {"allowed_sequences": ITEMS, "catalog_after": 13, "catalog_unique": True},
    {"allowed_sequences": ITEMS, "catalog_stop": True, "stop_token_ids": [13, 15], "catalog_unique": True},
    {"allowed_sequences": ITEMS[:2], "catalog_stop": True, "min_tokens": 3, "frequency_penalty": 0.5},
]
WITHOUT_TEXT = [options for options in OPTIONS if not options.keys() & {*NEEDS_TEXT}]
PLAIN_STEPS = {"beam_widths", "num_beam_groups"}  # which do not speculate
DRAFTED = [options for options in OPTIONS if not options.keys() & PLAIN_STEPS]
SAMPLED: list[dict[str, Any]] = [  # with or without a draft model
    {"do_sample": True, "seed": 3, "temperature": 0.7},
    {"do_sample": True, "seed": 4, "temperature": 0.7, "replacement": True},
    {"do_sample": True, "seed": 5, "temperature": 0.9, "stochastic": True, "logprobs": 1},
]
