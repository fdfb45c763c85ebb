"""The texts of a search's hypotheses, each as vLLM's detokenizer makes it: what several begin with is decoded once."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
from tokenizers import decoders
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer

NO_TOKEN = -1


class _Decoded(NamedTuple):
    stream: Any
    text: str


class HypothesisTexts:
    """The texts of the hypotheses of one search.

    Args:
        detokenizer: Of an answer to its prompt, before any token; see `can_share_hypothesis_texts`.
        token_ids: The tokens of all hypotheses, one after the other.
        lengths: Tokens of each.
    """

    def __init__(
        self, detokenizer: FastIncrementalDetokenizer, token_ids: Sequence[int], lengths: Sequence[int]
    ) -> None:
        self._detokenizer, self._num_shared = detokenizer, num_shared_text_tokens(token_ids, lengths)
        self._begin = _Decoded(detokenizer.stream, "")
        self._prefixes: dict[tuple[int, ...], _Decoded] = {}

    def text(self, index: int, tokens: list[int], has_stopped: bool) -> str:
        """That of a hypothesis.

        Args:
            index: Its place among all.
            tokens: Its own.
            has_stopped: So that vLLM may leave out the last one.
        """
        begin, count = self._begin, self._num_shared[index]
        if count:
            prefix = tuple(tokens[:count])
            if prefix not in self._prefixes:
                self._prefixes[prefix] = self._continued(begin, tokens[:count])
            begin = self._prefixes[prefix]
        return self._continued(begin, tokens[count:], has_stopped).text

    def _continued(self, begin: _Decoded, tokens: list[int], has_stopped: bool = False) -> _Decoded:
        detokenizer = self._detokenizer
        detokenizer.stream, detokenizer.output_text = copy(begin.stream), begin.text
        detokenizer.token_ids = []
        detokenizer.update(tokens, has_stopped)
        return _Decoded(detokenizer.stream, detokenizer.output_text)


class NoHypothesisTexts:
    """In place of texts where there is no tokenizer."""

    def text(self, *_: Any) -> str:
        return ""


def can_share_hypothesis_texts(detokenizer: IncrementalDetokenizer) -> bool:
    """Whether a text depends on nothing but its tokens and a stream, which can be copied.

    It does not where stop strings are looked for, for tokenizers in Python, nor where no space is written between
    added tokens. Streams of fastokens (`VLLM_USE_FASTOKENS=1`) cannot be copied.
    """
    if not isinstance(detokenizer, FastIncrementalDetokenizer):
        return False
    return detokenizer.spaces_between_special_tokens and not detokenizer.stop and _can_copy_text_decoders()


def _can_copy_text_decoders() -> bool:
    try:
        copy(decoders.DecodeStream(skip_special_tokens=True))
    except TypeError:
        return False
    return True


def num_shared_text_tokens(token_ids: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Of each hypothesis the number of tokens, its last one not among them, that one more begins with.

    Of two with the same tokens it may be fewer.
    """
    width = max(lengths, default=0)
    if width == 0:
        return len(lengths) * [0]
    tokens = np.full((len(lengths), width), NO_TOKEN, np.int32)
    tokens[np.arange(width) < np.array(lengths)[:, None]] = token_ids
    order = tokens.view(f"V{tokens.itemsize * width}").ravel().argsort()  # what begins alike comes one after the other
    in_order = tokens[order]
    with_next = (in_order[1:] != in_order[:-1]).argmax(axis=1)
    most = np.zeros(len(lengths), np.int64)
    most[order[:-1]] = with_next
    most[order[1:]] = np.maximum(most[order[1:]], with_next)
    found: list[int] = np.minimum(most, np.maximum(lengths, 1) - 1).tolist()
    return found
