"""Stop strings: which token completes one, judged on the text a hypothesis has generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

CONTEXT = 8  # tokens before the text that is judged: a whole character, and all but one of an open one, if each is four
UNKNOWN, NO, MAYBE = -1, 0, 1
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer writes for part of a character


class StopStrings:
    """The stop strings of one request.

    Few tokens can complete a given string: those whose own text contains it or begins with some
    ending of it. Only for these the hypothesis is decoded, and of it only as much as the longest
    string can span.

    Args:
        strings: The stop strings, not empty.
        decode: Text of a list of tokens, as the user will see it.
        vocab_size: Tokens are below this.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str], vocab_size: int) -> None:
        self.strings = tuple(strings)
        self._decode = decode
        self._longest = max(map(len, self.strings))
        self._suspicion = np.full(vocab_size, UNKNOWN, dtype=np.int8)  # by token

    def may_complete(self, tokens: np.ndarray) -> np.ndarray:
        """Which of `tokens`, any shape, could complete a string after some hypothesis."""
        for token in np.unique(tokens[self._suspicion[tokens] == UNKNOWN]).tolist():
            self._suspicion[token] = MAYBE if self._is_suspect(token) else NO
        return self._suspicion[tokens] == MAYBE

    def is_completed_by(self, token: int, prompt: Sequence[int], generated: Sequence[int]) -> bool:
        """Whether `token`, after a hypothesis, completes a string within the generated text.

        Args:
            prompt: Tokens of the prompt, or its last few.
            generated: Tokens of the hypothesis.
        """
        span = self._longest
        while True:
            window = [int(t) for t in generated[-span:]]
            rest = [*prompt, *generated[: max(len(generated) - span, 0)]]
            context, before = context_of(rest, self._decode)
            text = text_after(before, self._decode([*context, *window])).rstrip(INCOMPLETE)
            if (len(text) >= self._longest and INCOMPLETE not in before + text) or span >= len(generated):
                break
            span *= 2
        extended = text_after(before, self._decode([*context, *window, token]))
        return any(extended.find(s, max(len(text) - len(s) + 1, 0)) >= 0 for s in self.strings)

    def _is_suspect(self, token: int) -> bool:
        alone = self._decode([token])
        if INCOMPLETE in alone:
            return True
        behind = self._decode([token, token])[len(alone) :]  # some tokenizers write a first token differently
        return any(_fits(piece, string) for piece in (alone, behind) for string in self.strings)


def _fits(piece: str, string: str) -> bool:
    return string in piece or any(string.endswith(piece[:size]) for size in range(1, len(piece) + 1))


def context_of(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> tuple[list[int], str]:
    """The last few of some tokens, and their text, which begins within a character only if no whole one is in it."""
    context = [int(token) for token in tokens[-CONTEXT:]]
    whole = context
    while (text := decode(whole)).startswith(INCOMPLETE):
        whole = whole[1:]
    return (whole, text) if text else (context, decode(context))


def text_after(before: str, text: str) -> str:
    """What a text goes on with; `before` may end within a character, and then this begins with the whole of it."""
    num_common = next((i for i, (x, y) in enumerate(zip(before, text, strict=False)) if x != y), len(before))
    return text[num_common:]
