"""Stop strings: finds which token completes one in the text that a hypothesis has generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vllm_trie.search import search_part_on_demand

# Tokens before the text in question: a whole character, and an open one without its last token, at four each.
CONTEXT = 8
MOST_OPEN = 3  # bytes, or tokens, of an incomplete character
FIRST_SPAN = 16  # tokens of a hypothesis decoded at first, to find as much text as the longest string has
UNKNOWN, NO, MAYBE, ALWAYS = -1, 0, 1, 2  # whether a token completes a string
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer writes for part of a character


class SearchTextEnd(NamedTuple):
    """The end of a hypothesis' text.

    Args:
        state: The matcher's state.
        tokens: The last few tokens, which decide how the next one is decoded.
        before: A text with which the text of `tokens` and the next one begins.
        num_read: Characters after `before` that the matcher has read.
        is_whole: The text of `tokens` ends with a whole character.
    """

    state: int
    tokens: list[int]
    before: str
    num_read: int
    is_whole: bool


class SearchStopStrings:
    """The stop strings of one request.

    Few tokens can complete a given string. Those whose own text contains it complete it after any whole character. For
    those whose text begins with some ending of it, the hypothesis is decoded, once for all of them, and only as much of
    it as the longest string can span. The cost of a token does not depend on the number or length of the strings.

    Args:
        strings: The stop strings, not empty.
        decode: Text of a list of tokens, as the user will see it.
        vocab_size: Tokens are below this.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str], vocab_size: int) -> None:
        self.strings = tuple(strings)
        self._decode = decode
        self._longest = max(map(len, self.strings))
        self._matcher = search_part_on_demand("string_matcher:StopStringMatcher")(self.strings)
        self._endings = {string[start:] for string in self.strings for start in range(len(string))}
        self._suspicion = np.full(vocab_size, UNKNOWN, dtype=np.int8)  # by token

    def may_complete(self, tokens: np.ndarray) -> np.ndarray:
        """Which of `tokens`, any shape, could complete a string after some hypothesis."""
        for token in np.unique(tokens[self._suspicion[tokens] == UNKNOWN]).tolist():
            self._suspicion[token] = self._suspicion_of(token)
        return self._suspicion[tokens] != NO

    def completed(
        self, beams: np.ndarray, tokens: np.ndarray, end_of: Callable[[int, int], SearchTextEnd]
    ) -> np.ndarray:
        """Which of `tokens` complete a string, each after one of a group's beams.

        Args:
            beams, tokens: [G, K].
            end_of: The end of the hypothesis of a group's beam, which is called only where a token may complete one.
        """
        result = self.may_complete(tokens)
        groups, ranks = result.nonzero()
        beams, tokens = beams[groups, ranks], tokens[groups, ranks]
        codes, which = np.unique(groups << 32 | beams, return_inverse=True)
        ends = [end_of(code >> 32, code & 0xFFFFFFFF) for code in codes.tolist()]
        are_whole = np.array([end.is_whole for end in ends], dtype=bool)
        for place in ((self._suspicion[tokens] == MAYBE) | ~are_whole[which]).nonzero()[0].tolist():
            is_completed = self.is_completed_by(int(tokens[place]), ends[which[place]])
            result[groups[place], ranks[place]] = is_completed
        return result

    def end_of(self, prompt: Sequence[int], generated: Sequence[int]) -> SearchTextEnd:
        """The end of a hypothesis, for `is_completed_by`.

        Args:
            prompt: Tokens of the prompt, or its last few.
            generated: Tokens of the hypothesis.
        """
        span = min(self._longest, FIRST_SPAN)
        while True:
            window = [int(token) for token in generated[-span:]]
            num_before = max(len(generated) - span, 0)
            rest = [*prompt[-CONTEXT:], *generated[max(num_before - CONTEXT, 0) : num_before]]
            context, before = search_text_context(rest, self._decode)
            text = search_text_after(before, self._decode([*context, *window])).rstrip(INCOMPLETE)
            if (len(text) >= self._longest and INCOMPLETE not in before + text) or span >= len(generated):
                break
            span *= 2
        state, _ = self._matcher.read(text[-self._longest :])
        near, near_text = search_text_context([*context, *window], self._decode)
        is_whole = INCOMPLETE not in near_text
        if window and is_whole:
            return SearchTextEnd(state, near, near_text, 0, is_whole)
        return SearchTextEnd(state, [*context, *window], before, len(text), is_whole)

    def is_completed_by(self, token: int, end: SearchTextEnd) -> bool:
        """Whether a token that follows a hypothesis completes a string within the generated text."""
        text = search_text_after(end.before, self._decode([*end.tokens, token]))
        return self._matcher.read(text[end.num_read :], end.state)[1]

    def _suspicion_of(self, token: int) -> int:
        alone = self._decode([token])
        pieces = alone, self._decode([token, token])[len(alone) :]  # some tokenizers decode a first token differently
        if all(self._matcher.read(piece)[1] for piece in pieces):
            return ALWAYS
        return MAYBE if INCOMPLETE in alone or any(self._fits(piece) for piece in pieces) else NO

    def _fits(self, piece: str) -> bool:
        sizes = range(1, min(len(piece), self._longest) + 1)
        return any(piece[:size] in self._endings for size in sizes) or self._matcher.read(piece)[1]


def search_text_context(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> tuple[list[int], str]:
    """The last few tokens, and their text, which begins within a character only if they have no whole one.

    Some tokenizers (Llama 2, Gemma) decode a run of bytes either as characters or, if any is incomplete, not at all. Of
    a run that ends within a character this returns only the bytes of this character: the others would be spoilt.
    """
    context = [int(token) for token in tokens[-CONTEXT:]]
    whole, text = _search_text_from_character(context, decode)
    if text and not text.endswith(INCOMPLETE):
        return whole, text
    for num_open in range(1, MOST_OPEN + 1):
        before = _search_text_from_character(context[:-num_open], decode)[1]
        if before and not before.endswith(INCOMPLETE):
            if text.startswith(before):
                break
            return context[-num_open:], num_open * INCOMPLETE
    return (whole, text) if text else (context, decode(context))


def _search_text_from_character(tokens: list[int], decode: Callable[[list[int]], str]) -> tuple[list[int], str]:
    """The tokens without those at the beginning that are part of a character, and their text, which may be empty."""
    while (text := decode(tokens)).startswith(INCOMPLETE):
        tokens = tokens[1:]
    return tokens, text


def search_text_after(before: str, text: str) -> str:
    """What `text` adds to `before`; if `before` ends within a character, that whole character comes first."""
    num_common = next((i for i, (x, y) in enumerate(zip(before, text, strict=False)) if x != y), len(before))
    return text[num_common:]
