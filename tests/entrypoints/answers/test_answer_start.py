"""The text of an answer begins behind its prompt, as stop strings are judged, whatever the prompt ends with."""

from __future__ import annotations

import random
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from tests.support.engine import TRAINED_TARGET
from vllm_trie.compat.patch import wrap_vllm
from vllm_trie.detokenizing import detokenizing_function
from vllm_trie.messages import FORK, TICKET
from vllm_trie.search.stop_strings import CONTEXT, INCOMPLETE, SearchStopStrings

TEXT = "def f(x): return 'é€😀😀 naïve'\n日本語 = 1\n" * 3


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TRAINED_TARGET)


def decode(ids: list[int]) -> str:
    return detokenizing_function(tokenizer(), skip_special_tokens=True)(ids)


@cache
def of_sentence_pieces() -> Any:
    """A tokenizer that decodes as Llama's does: spaces before words, of which the first is left out; bytes."""
    vocab = ["<s>", "▁", "▁a", "▁bc", "d", ".", *(f"<0x{byte:02X}>" for byte in "é😀".encode())]
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(vocab)}, [], byte_fallback=True))
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(list(parts))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def pieces_of(text: str) -> list[int]:
    """Its tokens in that tokenizer, each the longest that fits."""
    vocab, ids, rest = of_sentence_pieces().get_vocab(), list[int](), "▁" + text.replace(" ", "▁")
    while rest:
        whole = next((rest[:size] for size in (3, 2, 1) if rest[:size] in vocab), None)
        ids += [vocab[f"<0x{byte:02X}>"] for byte in rest[0].encode()] if whole is None else [vocab[whole]]
        rest = rest[len(whole or rest[0]) :]
    return ids


def detokenizer(prompt: list[int], mark: str = TICKET, of: Any = None, **options: Any) -> IncrementalDetokenizer:
    wrap_vllm("vllm_trie.entrypoints.answers.answer_start")
    params = SamplingParams(**options, extra_args={mark: {}})
    request = SimpleNamespace(request_id="0", prompt_token_ids=prompt, sampling_params=params)
    return IncrementalDetokenizer.from_new_request(of or tokenizer(), request)


@cache
def cuts_within_characters(text: str = TEXT) -> list[tuple[list[int], list[int]]]:
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    return [(ids[:cut], ids[cut:]) for cut in range(1, len(ids)) if decode(ids[:cut]).endswith(INCOMPLETE)]


@cache
def cuts_within_bytes_in_a_row(text: str) -> list[tuple[list[int], list[int], str]]:
    """Of sentence pieces likewise, and the text that begins with the character that is open."""
    decode, cuts = of_sentence_pieces().decode, []
    ids = pieces_of(text)
    for place, character in enumerate(text):
        ends = range(1, len(character.encode()))
        start = len(pieces_of(text[:place])) if ends else 0
        cuts += [(ids[: start + end], ids[start + end :], text[place:]) for end in ends]
    assert all(decode(prompt).endswith(INCOMPLETE) for prompt, _, _ in cuts)
    return cuts


@pytest.mark.parametrize("text", [TEXT, "日本語 = 1", "é = 1"])
@pytest.mark.parametrize("mark", [TICKET, FORK])
@pytest.mark.parametrize("is_whole", [False, True])
def test_an_answer_begins_with_the_character_that_its_prompt_leaves_open(text: str, mark: str, is_whole: bool) -> None:
    for prompt, generated in cuts_within_characters(text):
        answer = detokenizer(prompt, mark)
        for tokens in [generated] if is_whole else [[token] for token in generated]:
            answer.update(tokens, False)
        assert answer.get_next_output_text(True, False) == text.removeprefix(decode(prompt).rstrip(INCOMPLETE))


BYTES_IN_A_ROW = "a é😀😀 d.ééééé bcéé😀d 😀😀😀😀😀😀 a."


@pytest.mark.parametrize("text", [BYTES_IN_A_ROW, "é a", "😀éé d"])
@pytest.mark.parametrize("is_whole", [False, True])
def test_bytes_in_a_row_of_which_a_prompt_leaves_some_open_are_characters(text: str, is_whole: bool) -> None:
    for prompt, generated, expected in cuts_within_bytes_in_a_row(text):
        answer = detokenizer(prompt, of=of_sentence_pieces())
        for tokens in [generated] if is_whole else [[token] for token in generated]:
            answer.update(tokens, False)
        assert answer.get_next_output_text(True, False) == expected


def test_what_a_prompt_leaves_open_for_good_is_no_part_of_the_answer() -> None:
    ids = partial(tokenizer().encode, add_special_tokens=False)
    answer = detokenizer([*ids("caf"), ids("é")[0]])
    answer.update(ids(" = 1"), False)
    assert answer.get_next_output_text(True, False) == " = 1"
    for prompt, _, _ in cuts_within_bytes_in_a_row(BYTES_IN_A_ROW):
        answer = detokenizer(prompt, of=of_sentence_pieces())
        answer.update(pieces_of("a.d"), False)
        assert answer.get_next_output_text(True, False) == " a.d"


@settings(max_examples=200, derandomize=True)
@given(st.integers(0, 1 << 32), st.booleans())
def test_it_ends_with_the_token_that_a_search_ends_with(seed: int, is_of_pieces: bool) -> None:
    choose, of = random.Random(seed), of_sentence_pieces() if is_of_pieces else tokenizer()
    text = BYTES_IN_A_ROW if is_of_pieces else TEXT
    cuts = [cut[:2] for cut in cuts_within_bytes_in_a_row(text)] if is_of_pieces else cuts_within_characters()
    prompt, generated = choose.choice(cuts)
    start = choose.randrange(len(text) - 6)
    stop = text[start : start + choose.randint(1, 6)]
    of_search = SearchStopStrings([stop], detokenizing_function(of, skip_special_tokens=True), len(of))
    places = ((n, of_search.end_of(prompt, generated[: n - 1])) for n in range(1, len(generated) + 1))
    ends = (n for n, before in places if of_search.is_completed_by(generated[n - 1], before))
    answer = detokenizer(prompt, of=of, stop=[stop])
    assert answer.update(generated, False) == (stop if (end := next(ends, None)) else None)
    assert answer.output_token_ids == generated[:end]


@settings(max_examples=100, derandomize=True)
@given(st.data(), st.booleans(), st.booleans())
def test_behind_whole_characters_it_is_what_it_is_behind_the_whole_prompt(
    data: st.DataObject, is_of_pieces: bool, skips: bool
) -> None:
    of = of_sentence_pieces() if is_of_pieces else tokenizer()
    few, some = st.lists(st.integers(0, len(of) - 1), min_size=1, max_size=4), st.integers(0, 9)
    prompt = [token for part in data.draw(st.lists(st.tuples(few, some))) for token in part[0] * part[1]]
    generated = data.draw(few)
    if of.decode(prompt, skip_special_tokens=skips).endswith(INCOMPLETE):
        return
    ours, stock = (detokenizer(prompt, mark, of, skip_special_tokens=skips) for mark in (TICKET, "of others"))
    for token in generated:
        ours.update([token], False)
        stock.update([token], False)
        assert ours.get_next_output_text(False, False) == stock.get_next_output_text(False, False)


@pytest.mark.parametrize("mark", [TICKET, FORK])
def test_of_a_long_prompt_few_tokens_are_decoded(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = list[list[int]]()

    def counted(ids: list[int], skip_special_tokens: bool) -> DecodeStream:
        streams.append(ids)
        return DecodeStream(ids=ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(decoders, "DecodeStream", counted)
    prompt = tokenizer().encode("return x\n" * 300, add_special_tokens=False)
    answer = detokenizer(prompt, mark)
    assert [len(ids) for ids in streams] == [len(prompt), CONTEXT]  # vLLM's own stream, and ours
    assert answer.stream.__class__ is DecodeStream


def test_a_stream_is_of_the_kind_that_a_backend_of_tokenizers_puts_in_place_of_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OfBackend:
        """As that of fastokens, which alone reads the tokenizers of that backend."""

        def __init__(self, ids: list[int], skip_special_tokens: bool) -> None:
            self._stream = DecodeStream(ids=ids, skip_special_tokens=skip_special_tokens)

        def step(self, tokenizer: Tokenizer, token: int) -> str | None:
            return self._stream.step(tokenizer, token)

    detokenizer([])  # what wraps vLLM's is imported before the backend is
    monkeypatch.setattr(decoders, "DecodeStream", OfBackend)
    prompt, generated = cuts_within_characters()[0]
    assert type(detokenizer(tokenizer().encode("return x")).stream) is OfBackend
    behind_half = detokenizer(prompt)
    behind_half.update(generated, False)
    assert type(behind_half.stream._stream) is OfBackend
