"""The text of an answer whose prompt ends within a character begins behind the prompt, as stop strings are judged."""

from __future__ import annotations

import random
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from tests.support.engine import TRAINED_TARGET
from vllm_trie.compat.patch import wrap_all
from vllm_trie.detokenizing import decoder
from vllm_trie.messages import FORK, TICKET
from vllm_trie.search.stop_strings import INCOMPLETE, StopStrings

TEXT = "def f(x): return 'é€😀😀 naïve'\n日本語 = 1\n" * 3


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TRAINED_TARGET)


def decode(ids: list[int]) -> str:
    return decoder(tokenizer(), skip_special_tokens=True)(ids)


def detokenizer(prompt: list[int], mark: str = TICKET, **options: Any) -> IncrementalDetokenizer:
    wrap_all("vllm_trie.entrypoints.half_characters")
    params = SamplingParams(**options, extra_args={mark: {}})
    request = SimpleNamespace(request_id="0", prompt_token_ids=prompt, sampling_params=params)
    return IncrementalDetokenizer.from_new_request(tokenizer(), request)


@cache
def cuts_within_characters(text: str = TEXT) -> list[tuple[list[int], list[int]]]:
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    return [(ids[:cut], ids[cut:]) for cut in range(1, len(ids)) if decode(ids[:cut]).endswith(INCOMPLETE)]


@pytest.mark.parametrize("text", [TEXT, "日本語 = 1", "é = 1"])
@pytest.mark.parametrize("mark", [TICKET, FORK])
@pytest.mark.parametrize("is_whole", [False, True])
def test_an_answer_begins_with_the_character_that_its_prompt_leaves_open(text: str, mark: str, is_whole: bool) -> None:
    for prompt, generated in cuts_within_characters(text):
        answer = detokenizer(prompt, mark)
        for tokens in [generated] if is_whole else [[token] for token in generated]:
            answer.update(tokens, False)
        assert answer.get_next_output_text(True, False) == text.removeprefix(decode(prompt).rstrip(INCOMPLETE))


def test_what_a_prompt_leaves_open_for_good_is_no_part_of_the_answer() -> None:
    ids = partial(tokenizer().encode, add_special_tokens=False)
    answer = detokenizer([*ids("caf"), ids("é")[0]])
    answer.update(ids(" = 1"), False)
    assert answer.get_next_output_text(True, False) == " = 1"


@settings(max_examples=300, derandomize=True)
@given(st.integers(0, 1 << 32))
def test_it_ends_with_the_token_that_a_search_ends_with(seed: int) -> None:
    choose = random.Random(seed)
    prompt, generated = choose.choice(cuts_within_characters())
    start = choose.randrange(len(TEXT) - 6)
    stop = TEXT[start : start + choose.randint(1, 6)]
    of_search = StopStrings([stop], decode, len(tokenizer()))
    places = ((n, of_search.end_of(prompt, generated[: n - 1])) for n in range(1, len(generated) + 1))
    ends = (n for n, before in places if of_search.is_completed_by(generated[n - 1], before))
    answer = detokenizer(prompt, stop=[stop])
    assert answer.update(generated, False) == (stop if (end := next(ends, None)) else None)
    assert answer.output_token_ids == generated[:end]
