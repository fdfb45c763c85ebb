"""The texts of a search's hypotheses, as from vLLM's detokenizer, with each shared prefix decoded once."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
from tokenizers import decoders
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer

from vllm_trie.entrypoints.answers.compact import padded_answer_tokens


class _Decoded(NamedTuple):
    stream: Any
    text: str


class HypothesisTexts:
    """The texts of the hypotheses of one search.

    Args:
        detokenizer: Of the request, before any token; see `can_share_hypothesis_texts`.
        token_ids: The concatenated tokens of all hypotheses.
        lengths: Tokens of each.
    """

    def __init__(
        self, detokenizer: FastIncrementalDetokenizer, token_ids: Sequence[int], lengths: Sequence[int]
    ) -> None:
        self._detokenizer, self._num_shared = detokenizer, num_shared_text_tokens(token_ids, lengths)
        self._begin = _Decoded(detokenizer.stream, "")
        self._prefixes: dict[tuple[int, ...], _Decoded] = {}

    def text(self, index: int, tokens: list[int], has_stopped: bool) -> str:
        """The text of one hypothesis.

        Args:
            index: Its place among all.
            tokens: Its tokens.
            has_stopped: Whether a stop token ended it, whose text vLLM may leave out.
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
    """Empty texts, for engines without a tokenizer."""

    def text(self, *_: Any) -> str:
        return ""


def can_share_hypothesis_texts(detokenizer: IncrementalDetokenizer) -> bool:
    """Whether texts depend only on their tokens and on a stream that can be copied.

    They do not with stop strings, tokenizers in Python, or `spaces_between_special_tokens=False`. Streams of fastokens
    (`VLLM_USE_FASTOKENS=1`) cannot be copied.
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
    """For each hypothesis, how many of its tokens but the last are a prefix of another one.

    For two with the same tokens it may be fewer.
    """
    width = max(lengths, default=0)
    if width == 0:
        return len(lengths) * [0]
    tokens = padded_answer_tokens(token_ids, np.array(lengths))
    order = tokens.view(f"V{tokens.itemsize * width}").ravel().argsort()  # common prefixes become adjacent
    in_order = tokens[order]
    with_next = (in_order[1:] != in_order[:-1]).argmax(axis=1)
    most = np.zeros(len(lengths), np.int64)
    most[order[:-1]] = with_next
    most[order[1:]] = np.maximum(most[order[1:]], with_next)
    found: list[int] = np.minimum(most, np.maximum(lengths, 1) - 1).tolist()
    return found
