"""Tokenizers made on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast


def word_pieces(words: Sequence[str], decoder: Any = None) -> PreTrainedTokenizerFast:
    """A tokenizer with these words, whose `decode` removes spaces before punctuation; what decodes a list does not."""
    words = ["[UNK]", *words]
    tokenizer = Tokenizer(models.WordPiece({word: token for token, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoder or decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens([AddedToken("[CLS]"), AddedToken("[SEP]")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True)
