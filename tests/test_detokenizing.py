"""Text of tokens is what vLLM's detokenizers write, of tokenizers of every kind."""

from __future__ import annotations

import random
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import AutoTokenizer, ByT5Tokenizer
from vllm import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from tests.support.engine import TRAINED_TARGET
from tests.support.tokenizers import word_pieces
from vllm_trie.detokenizing import detokenizing_function
from vllm_trie.search.stop_strings import CONTEXT, INCOMPLETE, SearchStopStrings, search_text_after, search_text_context

WORDS = ["a", "b", ".", ",", "'", "n't", "'s", "##b", "##.", "?", "!"]


@cache
def tokenizers() -> dict[str, Any]:
    return {
        "word pieces": word_pieces(WORDS),
        "word pieces that clean tokens": word_pieces(WORDS, decoders.WordPiece(cleanup=True)),
        "spaces in words": word_pieces(["▁a", "b", "▁.", "▁,", "▁n't", "▁'", "▁'s", ".", "▁"], decoders.Metaspace()),
        "bytes": AutoTokenizer.from_pretrained(TRAINED_TARGET),
        "in Python": ByT5Tokenizer(),
    }


def written(tokenizer: Any, prompt: list[int], generated: list[int], params: SamplingParams) -> str:
    """The text of an answer, by vLLM's detokenizer."""
    request: Any = SimpleNamespace(request_id="0", prompt_token_ids=prompt, prompt_embeds=None, sampling_params=params)
    answer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    answer.update(generated, False)
    return answer.get_next_output_text(True, False)


@pytest.mark.parametrize(
    "kind", ["word pieces", "word pieces that clean tokens", "spaces in words", "bytes", "in Python"]
)
@settings(max_examples=100, derandomize=True)
@given(st.integers(0, 1 << 32), st.booleans(), st.booleans())
def test_text_is_what_vllm_writes(kind: str, seed: int, skips_special_tokens: bool, has_spaces: bool) -> None:
    choose, tokenizer = random.Random(seed), tokenizers()[kind]
    prompt, generated = (choose.choices(range(min(len(tokenizer), 260)), k=choose.randint(1, 9)) for _ in range(2))
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    prompt = [token for token in prompt if token not in special] or [3]  # vLLM forgets which one the prompt ended with
    generated += choose.choices([*special], k=choose.randint(0, 3))
    choose.shuffle(generated)
    params = SamplingParams(skip_special_tokens=skips_special_tokens, spaces_between_special_tokens=has_spaces)
    decode = detokenizing_function(tokenizer, skips_special_tokens, has_spaces)
    context, before = search_text_context(prompt, decode)
    text = search_text_after(before, decode([*context, *generated]))
    if INCOMPLETE not in before + text:  # of what is no text, vLLM's streams write what depends on where they began
        assert written(tokenizer, prompt, generated, params) == text


@pytest.mark.parametrize("stop", [" .", " ,", " n't", "a ' b"])
def test_a_stop_string_with_a_space_before_punctuation_ends_where_vllm_finds_it(stop: str) -> None:
    tokenizer = tokenizers()["word pieces"]
    prompt, generated = [1, 2, 1], [1, 3, 1, 5, 2, 4, 1, 6, 2]
    assert tokenizer.decode(generated) != detokenizing_function(tokenizer, True)(generated)
    request: Any = SimpleNamespace(request_id="0", prompt_token_ids=prompt, sampling_params=SamplingParams(stop=[stop]))
    answer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    assert answer.update(generated, False) == stop
    of_search = SearchStopStrings([stop], detokenizing_function(tokenizer, True), len(tokenizer))
    for place, token in enumerate(generated):
        end = of_search.end_of(prompt[-CONTEXT:], generated[:place])
        assert of_search.is_completed_by(token, end) == (place + 1 == len(answer.output_token_ids))
        if place + 1 == len(answer.output_token_ids):
            break
