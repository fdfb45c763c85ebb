"""Tokenizes and checks `phrase_boosts`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from vllm_trie.options.parts import MOST_PHRASE_CHARACTERS, MOST_PHRASE_LENGTH, MOST_PHRASE_TOKENS
from vllm_trie.options.shown import shown_option

Ways = list[list[int]]
Boosts = list[tuple[Ways, float]]


def request_phrases_as_tokens(boosts: Sequence[tuple[Any, float]], tokenizer: Any) -> Boosts:
    """All ways to write each phrase as tokens, and its weight.

    Args:
        boosts: The value of the option.
        tokenizer: None if the engine has none.

    Raises:
        ValueError: names the option or phrase and what would work.
    """
    if (size := sum(len(phrase) for phrase, _ in boosts if isinstance(phrase, str))) > MOST_PHRASE_CHARACTERS:
        raise ValueError(
            f"phrase_boosts has {size:,} characters, and a request may have {MOST_PHRASE_CHARACTERS:,}; leave some out"
        )
    found = [(_ways_of_request_phrase(phrase, tokenizer), weight) for phrase, weight in boosts]
    if (num_tokens := sum(map(len, chain.from_iterable(ways for ways, _ in found)))) > MOST_PHRASE_TOKENS:
        raise ValueError(
            f"phrase_boosts has {num_tokens} tokens, and a request may have {MOST_PHRASE_TOKENS}; leave some out"
        )
    return found


def check_request_phrases(
    boosts: Sequence[tuple[Any, float]], found: Boosts, vocab_size: int, stops: Sequence[int]
) -> None:
    """Refuse phrases that no hypothesis can contain.

    Args:
        boosts: The value of the option.
        found: Their tokens.
        stops: The request's stop tokens.

    Raises:
        ValueError: names the phrase and what would work.
    """
    ending = frozenset(stops)  # a set, as there may be many stop tokens and ways
    for (ways, _), (phrase, _) in zip(found, boosts, strict=True):
        for way in ways:
            if not 0 <= min(way) <= max(way) < vocab_size:
                raise ValueError(
                    f"phrase_boosts: {shown_option(phrase)} is not a list of token ids; the vocabulary has {vocab_size}"
                )
            if len(way) > MOST_PHRASE_LENGTH:
                raise ValueError(
                    f"phrase_boosts: a phrase has {len(way)} tokens, and may have {MOST_PHRASE_LENGTH}; shorten it"
                )
            if not set(way[:-1]).isdisjoint(ending):
                raise ValueError(
                    f"phrase_boosts: {shown_option(phrase)} goes on after a stop token, which ends hypotheses; "
                    "end it there"
                )


def _ways_of_request_phrase(phrase: str | list[int] | Ways, tokenizer: Any) -> Ways:
    if not isinstance(phrase, str):
        return [phrase] if isinstance(phrase[0], int) else phrase
    if tokenizer is None:
        raise ValueError("phrase_boosts of strings needs a tokenizer; pass lists of token ids")
    if not (word := phrase.lstrip(" ")):
        raise ValueError(
            f"phrase_boosts: {shown_option(phrase)} is only spaces, with which no word begins; pass its token ids"
        )
    written = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, f" {word}"))
    return [list(way) for way in dict.fromkeys(written)]
