"""The matcher finds what looking for each string finds, and its work does not grow with their number or length."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.calls import num_calls
from vllm_trie.search.string_matcher import ROOT, StopStringMatcher

letters = st.text("ab€", min_size=1, max_size=5)


@settings(max_examples=500, derandomize=True)
@given(st.lists(letters, min_size=1, max_size=6), st.lists(st.text("ab€", max_size=4), max_size=8))
def test_a_string_ends_in_a_piece_where_a_plain_search_finds_its_end(strings: list[str], pieces: list[str]) -> None:
    matcher, state, text = StopStringMatcher(strings), ROOT, ""
    for piece in pieces:
        state, is_found = matcher.read(piece, state)
        ends = range(len(text) + 1, len(text) + len(piece) + 1)
        text += piece
        assert is_found == any(text[:end].endswith(string) for end in ends for string in strings)


def test_reading_a_text_takes_as_many_steps_for_many_long_strings_as_for_one() -> None:
    text = "aab" * 99
    few, many = (
        StopStringMatcher(["aac"]),
        StopStringMatcher(["aab" * 80 + chr(1000 + number) for number in range(200)]),
    )
    assert num_calls(lambda: many.read(text)) <= 2 * num_calls(lambda: few.read(text))
