"""Translates a request's options for the rows of its group, in any runner."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import lru_cache

from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config

from vllm_trie.search.stop_strings import SearchStopStrings

# What vLLM's sampler must not do to a beam row: the search does it. Greedy ordinary rows keep vLLM's fast path.
NO_SAMPLING = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None}
NO_SAMPLING |= {"min_tokens": 0, "logprobs": None}
STOP_STRINGS_KEPT = 64  # cached sets of stop strings, with the tokens known to complete them


def row_params(params: SamplingParams | None) -> SamplingParams | None:
    """A row's parameters for vLLM's sampler: penalties, biases, bans, and what custom processors read."""
    row = copy(params)
    for name, value in NO_SAMPLING.items():
        setattr(row, name, value)
    return row


def stop_strings_of_rows(model_config: ModelConfig) -> Callable[[tuple[str, ...], bool, bool], SearchStopStrings]:
    """A cached function from stop strings, and how special tokens are decoded, to their `SearchStopStrings`."""

    @lru_cache(maxsize=STOP_STRINGS_KEPT)
    def stop_strings(strings: tuple[str, ...], are_skipped: bool, have_spaces: bool) -> SearchStopStrings:
        from vllm_trie.detokenizing import detokenizing_function  # an import that most engines do not need

        decode = detokenizing_function(cached_tokenizer_from_config(model_config), are_skipped, have_spaces)
        return SearchStopStrings(strings, decode, model_config.get_vocab_size())

    return stop_strings
