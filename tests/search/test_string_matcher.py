"""The matcher finds what looking for each string finds, and its work does not grow with their number or length."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_trie.search.string_matcher import ROOT, StringMatcher

letters = st.text("ab€", min_size=1, max_size=5)


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(st.lists(letters, min_size=1, max_size=6), st.lists(st.text("ab€", max_size=4), max_size=8))
def test_a_string_ends_in_a_piece_where_a_plain_search_finds_its_end(strings: list[str], pieces: list[str]) -> None:
    matcher, state, text = StringMatcher(strings), ROOT, ""
    for piece in pieces:
        state, is_found = matcher.read(piece, state)
        ends = range(len(text) + 1, len(text) + len(piece) + 1)
        text += piece
        assert is_found == any(text[:end].endswith(string) for end in ends for string in strings)


def num_calls(work: Callable[[], Any]) -> int:
    """Calls of functions, in Python and in C, that some work takes."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_reading_a_text_takes_as_many_steps_for_many_long_strings_as_for_one() -> None:
    text = "aab" * 99
    few, many = StringMatcher(["aac"]), StringMatcher(["aab" * 80 + chr(1000 + number) for number in range(200)])
    assert num_calls(lambda: many.read(text)) <= 2 * num_calls(lambda: few.read(text))
