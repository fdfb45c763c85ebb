"""Ids of items are read from texts as JSON is, and nothing else is taken for them."""

from __future__ import annotations

import copy
import json
import pickle
from contextlib import suppress
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_trie import beam_params
from vllm_trie.options import BeamParams, parse_options
from vllm_trie.options.item_ids import MOST_EXCLUDED, ItemIds, read_item_ids

numbers = st.integers(-1 << 63, (1 << 63) - 1)
ARRAYS = np.ones(2), np.ones((1, 2), np.int64), np.array([1 << 63], np.uint64), np.ones(MOST_EXCLUDED + 1, np.int64)
separators = st.sampled_from([", ", ",", " , ", ",\n"])


@given(st.lists(numbers | st.integers(0, 99), max_size=20), separators)
def test_a_text_of_ids_is_the_list_that_json_reads(ids: list[int], separator: str) -> None:
    text = json.dumps(ids, separators=(separator, ":"))
    assert ItemIds.of(read_item_ids(text)).numbers.tolist() == sorted({*ids})
    assert ItemIds.of(ids).numbers.tolist() == sorted({*ids})


@given(st.lists(numbers, max_size=20), st.randoms(), separators)
def test_equal_sets_are_equal_in_any_order_and_form(ids: list[int], random: Random, separator: str) -> None:
    others = [*ids, *ids[:3]]
    random.shuffle(others)
    text = json.dumps(others, separators=(separator, ":"))
    assert ItemIds.of(ids) == ItemIds.of(others) == ItemIds.of({*ids}) == ItemIds.of(read_item_ids(text))


@given(st.text("[],0123456789- .\n", max_size=12).map("[{}]".format) | st.text("[],12 ", max_size=8))
def test_what_json_does_not_read_is_not_read(text: str) -> None:
    expected: object = ValueError
    with suppress(ValueError):
        expected = json.loads(text)
    found: object = ValueError
    with suppress(ValueError):
        found = read_item_ids(text)
    has_leading_zeros = expected is ValueError and isinstance(found, ItemIds)
    if has_leading_zeros:  # which JSON has not, and which are no other number
        assert found.numbers.tolist() == sorted({int(part) for part in text[1:-1].split(",")})
        assert any(part.strip()[0] == "0" for part in text[1:-1].split(","))
    else:
        assert found == (ItemIds.of(expected) if isinstance(found, ItemIds) else expected)


@pytest.mark.parametrize(
    "ids", [[1.0], [True], ["1"], [None], [[1]], (1.0,), {"1"}, b"12345678", [1 << 63], 5, *ARRAYS]
)
def test_what_is_no_list_of_integers_of_64_bits_is_refused(ids: object) -> None:
    with pytest.raises(
        ValueError, match=r"exclude_items=.* is not a list of at most 100,000 item ids; pass a list, set"
    ):
        BeamParams(beam_width=2, catalog="items", exclude_items=ids)


@pytest.mark.parametrize("ids", [(3, 5), {3, 5}, frozenset({3, 5}), np.array([3, 5], np.int32), [*np.array([3, 5])]])
def test_a_tuple_set_or_array_of_integers_is_a_list(ids: object) -> None:
    params = beam_params(2, catalog="items", exclude_items=ids)
    assert sorted(parse_options(params.extra_args).exclude_items.numbers) == [3, 5]


def test_an_array_is_no_option_of_a_search_by_steps() -> None:
    with pytest.raises(ValueError, match="exclude_items is not supported together with unit="):
        beam_params(2, unit="step", step_stop=["x"], scorer=len, exclude_items=np.array([3, 5]))


def test_a_text_of_too_many_is_refused_by_their_number() -> None:
    text = json.dumps([*range(10)] * (MOST_EXCLUDED // 10) + [1])
    with pytest.raises(ValueError, match="has 100,001 entries, and may have 100,000; shorten it"):
        parse_options({"beam_width": 2, "catalog": "items", "exclude_items": text})


def test_options_carry_ids_through_copies_and_processes() -> None:
    beam = BeamParams(beam_width=2, catalog="items", exclude_items=[3, 1])
    (ids,) = {beam.exclude_items, beam.model_dump()["exclude_items"], pickle.loads(pickle.dumps(beam.exclude_items))}
    assert isinstance(ids, ItemIds)
    assert copy.deepcopy(ids) is ids
    assert BeamParams(**beam.model_dump(exclude_unset=True)).exclude_items == ids
    assert "<2 item ids>" in repr(beam)
