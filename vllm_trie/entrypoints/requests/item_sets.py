"""Sets of items that come with requests, `allowed_sequences`: equal ones are read once while they are cached."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, groupby
from threading import Lock
from typing import Any

import msgspec

from vllm_trie.catalog import Catalog
from vllm_trie.entrypoints.requests.refusals import refuse_request_half_characters
from vllm_trie.entrypoints.requests.sequence_texts import INSTEAD, refuse_request_tokens, request_sequences_of
from vllm_trie.options.parts import MOST_SEQUENCE_CHARACTERS, MOST_STRING, SequencesText
from vllm_trie.options.shown import shortened_option_refusal, shown_option_name

MOST_KEPT = 64 << 20  # bytes of all cached sets
MOST_REFUSALS = 64  # cached, since a request with many prompts asks once per prompt
MOST_TOKENISED = 1_000  # strings at a time

Sequences = Sequence[str] | Sequence[Sequence[int]]


class RequestItemSets:
    """The sets that came with requests to one engine, least recently used first; safe to use from any thread.

    Args:
        longest: The most tokens of an item, `max_model_len`.
        most_bytes: Of all cached sets.
    """

    def __init__(self, longest: int, most_bytes: int = MOST_KEPT) -> None:
        self._longest, self._most_bytes = longest, most_bytes
        self._known = OrderedDict[bytes, Catalog]()
        self._refusals = OrderedDict[bytes, str]()
        self._lock = Lock()

    def read(self, sequences: Sequences | SequencesText, vocab_size: int, tokenizer: Any) -> Catalog:
        """The catalog of a set.

        Args:
            sequences: Strings, or lists of token ids; not empty. Or a JSON text of them, which is parsed if it is new.
            tokenizer: None if the engine has none.

        Raises:
            ValueError: names the option and what would work.
        """
        if is_text := isinstance(sequences, SequencesText):
            content = sequences.text.encode("utf-8", "surrogatepass")
        else:
            _refuse_large_request_items(sequences)
            content = msgspec.msgpack.encode(sequences)
        digest = hashlib.sha256(b"JSON"[: 4 * is_text] + content).digest()
        with self._lock:
            if (refusal := self._refusals.get(digest)) is not None:
                raise ValueError(refusal)
            if (known := self._known.get(digest)) is not None:
                self._known.move_to_end(digest)
                return known
        try:
            catalog = self._catalog(sequences, vocab_size, tokenizer)
        except ValueError as error:
            with self._lock:
                self._refusals[digest] = shortened_option_refusal(str(error))
                if len(self._refusals) > MOST_REFUSALS:
                    self._refusals.popitem(last=False)
            raise
        with self._lock:
            self._known[digest] = catalog
            while sum(of.data.nbytes for of in self._known.values()) > self._most_bytes and len(self._known) > 1:
                self._known.popitem(last=False)
        return catalog

    def _catalog(self, sequences: Sequences | SequencesText, vocab_size: int, tokenizer: Any) -> Catalog:
        if isinstance(sequences, SequencesText):
            sequences = request_sequences_of(sequences.text)
            _refuse_large_request_items(sequences)
        parts: Any = (
            [sequences] if not isinstance(sequences[0], str) else _tokenised_request_items(sequences, tokenizer)
        )
        rows: list[Sequence[int]] = []
        num_tokens = 0
        for part in parts:
            self._refuse_too_long(part)
            num_tokens += sum(map(len, part))
            refuse_request_tokens(num_tokens)
            rows += part
        try:
            return Catalog.from_sequences(rows, vocab_size=vocab_size)
        except ValueError as error:
            raise ValueError(f"allowed_sequences: {shown_option_name(error)}") from None

    def _refuse_too_long(self, rows: Collection[Sequence[int]]) -> None:
        if (longest := max(map(len, rows))) > self._longest:
            raise ValueError(
                f"allowed_sequences has an item of {longest:,} tokens, which exceeds max_model_len={self._longest}; "
                "leave it out"
            )


def _refuse_large_request_items(sequences: Sequences) -> None:
    """Refuse sets by their size, before anything reads more than lengths."""
    lengths = [*map(len, sequences)]
    size, longest = sum(lengths), max(lengths)
    if not isinstance(sequences[0], str):
        refuse_request_tokens(size)
    elif size > MOST_SEQUENCE_CHARACTERS:
        raise ValueError(
            f"allowed_sequences has {size:,} characters, and a request may have {MOST_SEQUENCE_CHARACTERS:,}; {INSTEAD}"
        )
    elif longest > MOST_STRING:
        raise ValueError(
            f"allowed_sequences has a string of {longest:,} characters, more than {MOST_STRING:,}; leave it out"
        )
    else:
        refuse_request_half_characters("allowed_sequences", "".join(map(str, sequences)))


def _tokenised_request_items(strings: Any, tokenizer: Any) -> Iterator[list[list[int]]]:
    """Tokenize strings, less than 200,000 characters at a time, which take a tenth of a second."""
    if tokenizer is None:
        raise ValueError("allowed_sequences of strings needs a tokenizer; pass lists of token ids")
    ends = enumerate(accumulate(map(len, strings)))
    places = ((number // MOST_TOKENISED, end // MOST_STRING) for number, end in ends)
    for _, some in groupby(zip(places, strings, strict=True), key=lambda pair: pair[0]):
        yield tokenizer([string for _, string in some], add_special_tokens=False)["input_ids"]
