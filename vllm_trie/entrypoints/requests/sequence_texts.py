"""Parses `allowed_sequences` in a JSON text piece by piece, so that other Python threads get a turn in between."""

from __future__ import annotations

import re
from json import JSONDecodeError, JSONDecoder
from typing import Annotated, Any

from pydantic import ConfigDict, TypeAdapter

from vllm_trie.options.parts import FAIL_FAST, MOST_SEQUENCE_TOKENS, MOST_SEQUENCES, WRONG_SEQUENCES, Int64
from vllm_trie.options.shown import shown_option

PIECE = 1 << 16  # characters of a token sequence that are parsed at a time
INSTEAD = "build a catalog of them with python -m vllm_trie.catalog build"

_TOKENS: TypeAdapter[list[int]] = TypeAdapter(Annotated[list[Int64], FAIL_FAST], config=ConfigDict(strict=True))
_JSON = JSONDecoder()
_GAP = re.compile(r"[ \t\n\r]*")


class _NoSequencesError(Exception):
    """The text is not a list of sequences."""


def request_sequences_of(text: str) -> list[str] | list[list[int]]:
    """The strings, or lists of token ids, of a JSON text; parsing stops once there are too many.

    Raises:
        ValueError: names the option and what would work.
    """
    try:
        return _request_sequences(text)
    except (_NoSequencesError, JSONDecodeError):
        raise ValueError(f"allowed_sequences={shown_option(text)} {WRONG_SEQUENCES}") from None


def refuse_request_tokens(count: int) -> None:
    """Refuse more tokens than a request may have."""
    if count > MOST_SEQUENCE_TOKENS:
        raise ValueError(f"allowed_sequences has more than {MOST_SEQUENCE_TOKENS:,} tokens; {INSTEAD}")


def _request_sequences(text: str) -> list[Any]:
    found: list[Any] = []
    num_tokens, place = 0, _request_text_after_mark("[", text, _request_text_after_gap(text, 0))
    while True:
        place = _request_text_after_gap(text, place)
        if len(found) == MOST_SEQUENCES:
            raise ValueError(f"allowed_sequences has more than {MOST_SEQUENCES:,} entries; {INSTEAD}")
        if text.startswith('"', place):
            entry, place = _JSON.raw_decode(text, place)
        else:
            entry, place = _request_sequence_tokens(text, _request_text_after_mark("[", text, place), num_tokens)
            num_tokens += len(entry)
        found.append(entry)
        if type(entry) is not type(found[0]):
            raise _NoSequencesError
        place = _request_text_after_gap(text, place)
        if not text.startswith(",", place):
            break
        place += 1
    if _request_text_after_gap(text, _request_text_after_mark("]", text, place)) < len(text):
        raise _NoSequencesError
    return found


def _request_sequence_tokens(text: str, place: int, num_before: int) -> tuple[list[int], int]:
    """The tokens of a list, and the position after it."""
    tokens: list[int] = []
    if (end := text.find("]", place)) < 0:
        raise _NoSequencesError
    while True:
        comma = text.find(",", place + PIECE, end)
        try:
            piece = _TOKENS.validate_json(f"[{text[place : end if comma < 0 else comma]}]")
        except ValueError:
            raise _NoSequencesError from None
        if not piece and (tokens or comma >= 0):  # nothing between two commas, or after the last one
            raise _NoSequencesError
        tokens += piece
        refuse_request_tokens(num_before + len(tokens))
        if comma < 0:
            return tokens, end + 1
        place = comma + 1


def _request_text_after_gap(text: str, place: int) -> int:
    gap = _GAP.match(text, place)
    assert gap is not None
    return gap.end()


def _request_text_after_mark(mark: str, text: str, place: int) -> int:
    if not text.startswith(mark, place):
        raise _NoSequencesError
    return place + 1
