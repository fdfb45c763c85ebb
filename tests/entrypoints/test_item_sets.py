"""Sets of items that come with requests, read and kept within bounds."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_trie.entrypoints import item_sets
from vllm_trie.entrypoints.item_sets import ItemSets


class _Letters:
    """A tokenizer whose tokens are letters, and which counts what it is given."""

    num_texts = 0

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, Any]:
        assert not add_special_tokens
        self.num_texts += len(texts)
        return {"input_ids": [[*map(ord, text)] for text in texts]}


def test_equal_sets_are_read_once() -> None:
    sets, letters = ItemSets(), _Letters()
    first = sets.read(["ab", "cd"], 200, letters)
    assert sets.read(["ab", "cd"], 200, letters) is first
    assert sets.read(["ab", "ce"], 200, letters) is not first
    assert sets.read([[97, 98], [99, 100]], 200, letters).digest == first.digest
    assert letters.num_texts == 4


def test_sets_that_stay_known_have_a_bound_in_bytes() -> None:
    size = ItemSets().read([[1]], 200, None).data.nbytes
    sets = ItemSets(most_bytes=2 * size)
    known = [sets.read([[token]], 200, None) for token in range(3)]
    assert sets.read([[2]], 200, None) is known[2]
    assert sets.read([[1]], 200, None) is known[1]
    assert sets.read([[0]], 200, None) is not known[0]


def test_a_set_of_too_many_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_sets, "MOST_SEQUENCE_TOKENS", 8)
    with pytest.raises(ValueError, match="allowed_sequences have 9 tokens, and a request may bring 8; build a"):
        ItemSets().read([[7, 8, 9]] * 3, 200, None)
    with pytest.raises(ValueError, match="allowed_sequences have 9 tokens, and a request may bring 8; build a"):
        ItemSets().read(["abc"] * 3, 200, _Letters())


def test_too_many_characters_are_refused_before_they_are_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = _Letters()
    monkeypatch.setattr(item_sets, "MOST_SEQUENCE_CHARACTERS", 8)
    with pytest.raises(ValueError, match="allowed_sequences have 9 characters, and a request may bring 8; build a"):
        ItemSets().read(["abc"] * 3, 200, letters)
    assert letters.num_texts == 0
