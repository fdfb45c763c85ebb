"""Sets of items that come with requests: read once for equal ones, as far as there is room to keep them."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

import msgspec

from vllm_trie.catalog import Catalog
from vllm_trie.entrypoints.lone_surrogates import refuse_half_characters
from vllm_trie.options.parts import MOST_SEQUENCE_CHARACTERS, MOST_SEQUENCE_TOKENS
from vllm_trie.options.shown import shown_name

MOST_KEPT = 64 << 20  # bytes, of all sets that are known

Sequences = Sequence[str] | Sequence[Sequence[int]]


class ItemSets:
    """The sets that one engine's requests have brought, the one that was used last at last; any thread may ask.

    Args:
        most_bytes: Of those that stay known.
    """

    def __init__(self, most_bytes: int = MOST_KEPT) -> None:
        self._most_bytes = most_bytes
        self._known = OrderedDict[bytes, Catalog]()
        self._lock = Lock()

    def read(self, sequences: Sequences, vocab_size: int, tokenizer: Any) -> Catalog:
        """The set, as a catalog.

        Args:
            sequences: Strings, or lists of token ids; not empty.
            tokenizer: None if the engine has none.

        Raises:
            ValueError: naming the option, and what would work.
        """
        _refuse_too_large(sequences)
        digest = hashlib.sha256(msgspec.msgpack.encode(sequences)).digest()
        with self._lock:
            if (known := self._known.get(digest)) is not None:
                self._known.move_to_end(digest)
                return known
        catalog = _catalog(sequences, vocab_size, tokenizer)
        with self._lock:
            self._known[digest] = catalog
            while sum(of.data.nbytes for of in self._known.values()) > self._most_bytes and len(self._known) > 1:
                self._known.popitem(last=False)
        return catalog


def _refuse_too_large(sequences: Sequences) -> None:
    """Before anything goes through them but their lengths."""
    size = sum(map(len, sequences))
    if not isinstance(sequences[0], str):
        _refuse_tokens(size)
    elif size > MOST_SEQUENCE_CHARACTERS:
        raise ValueError(
            f"allowed_sequences have {size:,} characters, and a request may bring {MOST_SEQUENCE_CHARACTERS:,}; "
            "build a catalog of them, by python -m vllm_trie.catalog build"
        )
    else:
        refuse_half_characters("allowed_sequences", "".join(map(str, sequences)))


def _refuse_tokens(count: int) -> None:
    if count > MOST_SEQUENCE_TOKENS:
        raise ValueError(
            f"allowed_sequences have {count} tokens, and a request may bring {MOST_SEQUENCE_TOKENS}; build a "
            "catalog of them, by python -m vllm_trie.catalog build"
        )


def _catalog(sequences: Sequences, vocab_size: int, tokenizer: Any) -> Catalog:
    rows: Any = sequences
    if isinstance(sequences[0], str):
        if tokenizer is None:
            raise ValueError("allowed_sequences of strings need a tokenizer; pass lists of token ids")
        rows = tokenizer(list(sequences), add_special_tokens=False)["input_ids"]
        _refuse_tokens(sum(map(len, rows)))
    try:
        return Catalog.from_sequences(rows, vocab_size=vocab_size)
    except ValueError as error:
        raise ValueError(f"allowed_sequences: {shown_name(error)}") from None
