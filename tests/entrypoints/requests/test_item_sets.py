"""Sets of items that come with requests, read and kept within bounds."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest

from vllm_trie.entrypoints.requests import item_sets, sequence_texts
from vllm_trie.entrypoints.requests.item_sets import RequestItemSets
from vllm_trie.entrypoints.requests.sequence_texts import request_sequences_of
from vllm_trie.options.parts import MOST_SEQUENCE_TOKENS, MOST_SEQUENCES, MOST_STRING, SequencesText

LONGEST = 512  # tokens of an item


class _Letters:
    """A tokenizer whose tokens are letters, and which counts what it is given."""

    num_texts = 0

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, Any]:
        assert not add_special_tokens
        self.num_texts += len(texts)
        return {"input_ids": [[*map(ord, text)] for text in texts]}


def test_equal_sets_are_read_once() -> None:
    sets, letters = RequestItemSets(LONGEST), _Letters()
    first = sets.read(["ab", "cd"], 200, letters)
    assert sets.read(["ab", "cd"], 200, letters) is first
    assert sets.read(["ab", "ce"], 200, letters) is not first
    assert sets.read([[97, 98], [99, 100]], 200, letters).digest == first.digest
    assert letters.num_texts == 4


def test_sets_that_stay_known_have_a_bound_in_bytes() -> None:
    size = RequestItemSets(LONGEST).read([[1]], 200, None).data.nbytes
    sets = RequestItemSets(LONGEST, most_bytes=2 * size)
    known = [sets.read([[token]], 200, None) for token in range(3)]
    assert sets.read([[2]], 200, None) is known[2]
    assert sets.read([[1]], 200, None) is known[1]
    assert sets.read([[0]], 200, None) is not known[0]


def test_a_set_of_too_many_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_texts, "MOST_SEQUENCE_TOKENS", 8)
    with pytest.raises(ValueError, match="allowed_sequences has more than 8 tokens; build a"):
        RequestItemSets(LONGEST).read([[7, 8, 9]] * 3, 200, None)
    with pytest.raises(ValueError, match="allowed_sequences has more than 8 tokens; build a"):
        RequestItemSets(LONGEST).read(["abc"] * 3, 200, _Letters())


def test_too_many_characters_are_refused_before_they_are_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = _Letters()
    monkeypatch.setattr(item_sets, "MOST_SEQUENCE_CHARACTERS", 8)
    with pytest.raises(ValueError, match="allowed_sequences has 9 characters, and a request may have 8; build a"):
        RequestItemSets(LONGEST).read(["abc"] * 3, 200, letters)
    assert letters.num_texts == 0


def test_an_item_that_no_sequence_of_the_engine_can_hold_is_refused() -> None:
    refusal = "allowed_sequences has an item of 4 tokens, which exceeds max_model_len=3; leave it out"
    letters = _Letters()
    for items in ([[1], [1, 2, 3, 4]], ["a", "abcd"], SequencesText('["abcd"]')):
        with pytest.raises(ValueError, match=refusal):
            RequestItemSets(3).read(items, 200, letters)
    assert RequestItemSets(3).read(["abc"], 200, letters).longest == 3


def test_a_string_of_too_many_characters_is_refused_before_it_is_tokenised() -> None:
    letters = _Letters()
    with pytest.raises(ValueError, match="has a string of 100,001 characters, more than 100,000; leave it out"):
        RequestItemSets(LONGEST).read(["a", "x" * (MOST_STRING + 1)], 200, letters)
    assert letters.num_texts == 0


def test_strings_are_tokenised_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[list[int]] = []

    def tokenizer(texts: list[str], add_special_tokens: bool) -> dict[str, Any]:
        sizes.append([*map(len, texts)])
        return {"input_ids": [[1] for _ in texts]}

    monkeypatch.setattr(item_sets, "MOST_STRING", 10)
    monkeypatch.setattr(item_sets, "MOST_TOKENISED", 4)
    RequestItemSets(LONGEST).read(["x" * size for size in (4, 4, 10, 9, 1, 1, 1, 1, 1)], 200, tokenizer)
    assert sizes == [[4, 4], [10], [9], [1, 1], [1, 1], [1]]
    assert max(map(sum, sizes)) < 2 * 10


@pytest.mark.parametrize("text", ['["a,]", "\\u00e9"]', " [ [1, 2 ] ,[3],[] ]\n", "[[-1]]", '[""]'])
def test_a_text_is_read_as_json_is(text: str) -> None:
    assert request_sequences_of(text) == json.loads(text)


def test_a_long_list_of_tokens_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in range(1, 12):
        monkeypatch.setattr(sequence_texts, "PIECE", size)
        assert request_sequences_of("[[1, 22, 333, 4], [5]]") == [[1, 22, 333, 4], [5]]
        for text in ("[[1,22,333,]]", "[[1,,22]]", "[[1,22 333]]"):
            with pytest.raises(ValueError, match="is not a list of 1 to 100,000 strings, or lists of token ids"):
                request_sequences_of(text)


NO_SEQUENCES = ["", "x", "[]", "[[1]", "[[1]]]", "[[1],]", '[[1],"a"]', "[1]", "[[1.5]]", "[[true]]", '[["1"]]', "{}"]
NO_SEQUENCES += ["[[[1]]]", "[" * 100_000, "[[1]] 2", '["a', "[[9223372036854775808]]", '[[1, "\ud800"]]', '["a"b"]']


@pytest.mark.parametrize("text", NO_SEQUENCES)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"^allowed_sequences=.* is not a list of 1 to 100,000 strings, or lists of token ids"
    ):
        request_sequences_of(text)


def test_a_text_is_read_no_further_than_there_may_be_entries_and_tokens() -> None:
    with pytest.raises(ValueError, match="allowed_sequences has more than 100,000 entries; build a"):
        request_sequences_of("[" + "[]," * MOST_SEQUENCES + "and so on")
    with pytest.raises(ValueError, match="allowed_sequences has more than 2,000,000 tokens; build a"):
        request_sequences_of("[[" + "1," * (MOST_SEQUENCE_TOKENS + sequence_texts.PIECE) + "and so on]]")


def test_strings_are_tokenised_no_further_than_there_may_be_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_texts, "MOST_SEQUENCE_TOKENS", 8)
    letters = _Letters()
    with pytest.raises(ValueError, match="allowed_sequences has more than 8 tokens"):
        RequestItemSets(LONGEST).read(["ab"] * 10_000, 200, letters)
    assert letters.num_texts == item_sets.MOST_TOKENISED


@pytest.mark.parametrize(("text", "is_refused"), [("[[7], [8]]", False), ("[[7], [900]]", True), ("[[7", True)])
def test_an_equal_text_is_read_once_refused_or_not(
    text: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets, read = RequestItemSets(LONGEST), []
    monkeypatch.setattr(item_sets, "request_sequences_of", lambda text: read.append(text) or request_sequences_of(text))
    for _ in range(3):
        with pytest.raises(ValueError, match="allowed_sequences") if is_refused else nullcontext():
            sets.read(SequencesText(text), 200, None)
    assert read == [text]


def test_refusals_that_stay_known_have_a_bound() -> None:
    sets = RequestItemSets(LONGEST)
    for number in range(item_sets.MOST_REFUSALS + 9):
        with pytest.raises(ValueError, match="has token"):
            sets.read([[1_000 + number]], 200, None)
    assert len(sets._refusals) == item_sets.MOST_REFUSALS
