"""The text of tokens as vLLM's detokenizers write it: stop strings and delimiters are searched in what a user reads.

`tokenizer.decode` differs: with some tokenizers it removes spaces before punctuation, which vLLM keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from vllm_trie.search.stop_strings import search_text_after

Decode = Callable[[list[int]], str]


def is_detokenizing_in_rust(tokenizer: Any) -> bool:
    """Whether this tokenizer wraps one in Rust, by which vLLM then detokenizes."""
    from transformers import PreTrainedTokenizerFast  # here: kernel checks run without transformers

    return isinstance(tokenizer, PreTrainedTokenizerFast)


def detokenizing_function(
    tokenizer: Any, skip_special_tokens: bool, spaces_between_special_tokens: bool = True
) -> Decode:
    """A function from tokens to their text.

    Args:
        tokenizer: Of the engine.
        skip_special_tokens, spaces_between_special_tokens: As in `SamplingParams`.
    """
    if not is_detokenizing_in_rust(tokenizer):
        return _DetokenizingSlowly(tokenizer, skip_special_tokens, spaces_between_special_tokens)
    decode: Decode = partial(tokenizer._tokenizer.decode, skip_special_tokens=skip_special_tokens)
    if skip_special_tokens or spaces_between_special_tokens:
        return decode
    added = {token: of.content for token, of in tokenizer._tokenizer.get_added_tokens_decoder().items()}
    return partial(_detokenizing_without_spaces, decode, added)


def _detokenizing_without_spaces(decode: Decode, added: dict[int, str], tokens: list[int]) -> str:
    """As vLLM's `FastIncrementalDetokenizer`: an added token that follows another adds its content without a space."""
    text, start = "", 0
    for place in range(1, len(tokens)):
        if tokens[place] in added and tokens[place - 1] in added:
            text += search_text_after(decode(tokens[:start]), decode(tokens[:place])) + added[tokens[place]]
            start = place + 1
    return text + search_text_after(decode(tokens[:start]), decode(tokens))


class _DetokenizingSlowly:
    """As vLLM's `SlowIncrementalDetokenizer`, for tokenizers in Python."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool, spaces_between_special_tokens: bool) -> None:
        self._tokenizer, self._size = tokenizer, len(tokenizer)
        self._skips_special_tokens = skip_special_tokens
        self._added = frozenset[str]() if tokenizer.is_fast else frozenset(tokenizer.get_added_vocab())
        self._between = " " if spaces_between_special_tokens else ""

    def __call__(self, tokens: Sequence[int]) -> str:
        known = [token for token in tokens if token < self._size]  # a model may have more tokens than its tokenizer
        written: Iterable[str | None] = self._tokenizer.convert_ids_to_tokens(
            known, skip_special_tokens=self._skips_special_tokens
        )
        pieces = [piece or "" for piece in written]
        to_text: Callable[[list[str]], str] = self._tokenizer.convert_tokens_to_string
        if not self._added:
            return to_text(pieces)
        runs = ((is_added, list(run)) for is_added, run in groupby(pieces, self._added.__contains__))
        return self._between.join(text for is_added, run in runs for text in (run if is_added else [to_text(run)]))
