"""A refusal quotes of a request as much as it takes to find it, however large that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest

from vllm_trie import beam_params
from vllm_trie.options import OPTIONS, parse_options, request
from vllm_trie.options.request import MOST_KEYS
from vllm_trie.options.shown import (
    MOST_LISTED,
    MOST_QUOTED,
    MOST_SHOWN,
    listed_option_names,
    shortened_option_refusal,
    shown_option,
    shown_option_name,
)
from vllm_trie.options.table import MOST_LIKE, OTHER_NAMES, most_of_option

MANY = 1_000_000


class _Unwritten:
    """Whoever writes all of it down fails."""

    def __len__(self) -> int:
        return MANY

    def __repr__(self) -> str:
        raise AssertionError("all of it was written down")


LARGE: dict[str, Callable[[], Any]] = {
    "a text": lambda: "a" * MANY,
    "a list": lambda: ["a" * MANY] * MANY,
    "lists in lists": lambda: [[[[[["a" * MANY] * 9] * 9] * 9] * 9] * 9] * 9,
    "a mapping": lambda: dict.fromkeys(map(str, range(MANY)), "b" * MANY),
    "a number": lambda: 1 << MANY,
    "a long number": lambda: 10**200,
    "an array": lambda: np.ones(MANY),
    "what writes itself": _Unwritten,
}


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
def test_a_value_is_shown_in_few_characters(make: Callable[[], Any]) -> None:
    assert 0 < len(shown_option(make())) <= MOST_SHOWN


@pytest.mark.parametrize("value", [3, 2.5, True, None, "tree", [2, 3], {"model": "draft"}, "a 'b'"])
def test_a_short_value_is_shown_as_it_is(value: object) -> None:
    assert shown_option(value) == repr(value)


def test_a_long_name_keeps_its_beginning_and_its_end() -> None:
    assert shown_option_name("begin" + "a" * MANY + "end").startswith("begina")
    assert shown_option_name("begin" + "a" * MANY + "end").endswith("aend")


def test_names_are_listed_as_far_as_there_is_room() -> None:
    assert listed_option_names(["a", "b"]) == "a, b"
    text = listed_option_names(OPTIONS)
    assert text.startswith("beam_width, ")
    assert text.endswith(f"and {len(OPTIONS) - text.count(',') - 1} more")
    assert len(text) < MOST_LISTED + 20
    assert shortened_option_refusal("a" * MANY) != "a" * MANY


def sequences_of_a_text() -> str:
    return f"[{'[1],' * 9 * MANY}[1]]"


HOSTILE: dict[str, Callable[[], Mapping[str, Any]]] = {  # made when they are tested: they are large
    "a near miss with a large value": lambda: {"beam_widht": "x" * MANY},
    "all options without a width": lambda: dict.fromkeys(OPTIONS.keys() - {"beam_width", "beam_widths"}, 1),
    "too many keys": lambda: {"beam_width": 2, **dict.fromkeys(map(str, range(MOST_KEYS)), 1)},
    "a million widths": lambda: {"beam_widths": [1] * MANY},
    "a million widths beside another": lambda: {"beam_width": 2, "beam_widths": [1] * MANY},
    "widths that are no integers": lambda: {"beam_widths": ["x" * MANY] * 9},
    "a text that would be a million sequences": lambda: {
        "beam_width": 2,
        "allowed_sequences": sequences_of_a_text(),
    },
    "a set in a search by steps": lambda: {
        "beam_width": 2,
        "unit": "step",
        "allowed_sequences": sequences_of_a_text(),
    },
    "phrases in a search by steps": lambda: {"beam_width": 2, "unit": "step", "phrase_boosts": "[" * MANY},
    "sequences that are no lists": lambda: {"beam_width": 2, "allowed_sequences": [1] * 100_000},
    "a million sequences": lambda: {"beam_width": 2, "allowed_sequences": [[1]] * MANY},
    "phrases that are none": lambda: {"beam_width": 2, "phrase_boosts": [1] * 1_000},
    "phrases nested without end": lambda: {"beam_width": 2, "phrase_boosts": "[" * 200_000},
    "a text of a megabyte for a contrast": lambda: {"beam_width": 2, "contrast": "{" * MANY},
    "a mapping for a contrast": lambda: {"beam_width": 2, "contrast": dict.fromkeys(map(str, range(MANY)), 1)},
    "delimiters of a megabyte": lambda: {"beam_width": 2, "unit": "step", "scorer": "a", "step_stop": ["x" * MANY]},
    "options that do not go together": lambda: {
        "beam_widths": [3] * 4096,
        "allowed_sequences": [["x" * MANY]],
        "stop": "x",
    },
    "widths of a thousand digits": lambda: {"beam_width": 10**1000, "min_width": 10**1001, "threshold": 0.5},
} | {f"a large text for {name}": lambda name=name: {"beam_width": 2, name: "x" * 40 * MANY} for name in OPTIONS}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_a_refusal_is_one_sentence_of_at_most_500_characters(make: Callable[[], Mapping[str, Any]]) -> None:
    extra_args = make()
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        parse_options(extra_args)
    text = str(refusal.value)
    assert len(text) <= MOST_QUOTED
    assert "\n" not in text


def test_beam_params_shortens_what_it_quotes_too() -> None:
    for options in ({"beam_widht": "x" * MANY}, {"y" * MANY: 1}, {"beam_width": 2, "max_tokens": "x" * MANY}):
        with pytest.raises(ValueError) as refusal:  # noqa: PT011
            beam_params(**options)
        assert len(str(refusal.value)) <= MOST_QUOTED


class _Counted(dict[str, Any]):
    """Counts how many of its keys are looked at."""

    looked_at = 0

    def items(self) -> Any:
        for key, value in super().items():
            self.looked_at += 1
            yield key, value


def test_of_an_ordinary_request_few_names_are_compared() -> None:
    extra_args = _Counted({f"key{number}": number for number in range(10_000)})
    assert parse_options(extra_args) is None
    assert extra_args.looked_at <= MOST_KEYS


def test_no_name_is_longer_than_what_is_compared() -> None:
    known = [*OPTIONS, *(name for names in OTHER_NAMES.values() for name in names.split())]
    assert 1.5 * max(map(len, known)) < MOST_LIKE


BOUNDS = {  # characters of a text, and entries of a list, of options that take either
    "beam_widths": (256, 4_096),
    "phrase_boosts": (500_000, 1_000),
    "allowed_sequences": (20_000_000, 100_000),
    "catalog": (256, 256),
    "catalog_after": (256, 256),
    "exclude_items": (2_200_000, 100_000),
    "exclude_list": (256, 256),
    "metric": (256, 256),
    "step_stop": (256, 64),
    "scorer": (2_000, 256),
}


def kinds_of(annotation: Any) -> set[Any]:
    """What a value may be, a part of one among them; of few known ones nothing."""
    parts = () if get_origin(annotation) is Literal else get_args(annotation)
    return {annotation, get_origin(annotation)}.union(*map(kinds_of, parts))


def test_options_that_take_texts_or_lists_have_these_bounds() -> None:
    open_ended = {name: field for name, field in OPTIONS.items() if kinds_of(field.annotation) & {str, list, dict, Any}}
    assert {
        name: (most_of_option(of, str)[0], most_of_option(of, list)[0]) for name, of in open_ended.items()
    } == BOUNDS


@pytest.mark.parametrize("name", ["allowed_sequences", "phrase_boosts"])
def test_a_search_by_steps_reads_no_text_that_it_does_not_take(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"beam_width": 2, "unit": "step", "step_stop": ["\n"], "scorer": "a"}
    with pytest.raises(ValueError, match=f"{name}=.* characters, and may have .*; shorten it"):
        parse_options({**asked, name: "x" * 40 * MANY})
    monkeypatch.setattr(request.json, "loads", lambda text: pytest.fail("it was read"))
    with pytest.raises(ValueError, match=f"{name}='x' is not supported together with unit="):
        parse_options({**asked, name: "x"})


def test_what_cannot_be_sent_or_shown_of_a_name_is_escaped() -> None:
    assert shown_option_name("\ud800\n'é") == "\\ud800\\n'é"
