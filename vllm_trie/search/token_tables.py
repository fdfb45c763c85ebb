"""Tables over the vocabulary for sets of tokens that come with requests, such as stop tokens; each uploaded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch

from vllm_trie.search.devices import cached_search_tensors_within, uploaded_for_search

CPU = torch.device("cpu")
MOST_TOKENS = 1 << 31  # more than any vocabulary has
TABLE_BYTES = 32 << 20  # cached tables of each kind, besides those of running searches, and their keys
BYTES_OF_ID = 40  # of a token in a key: a number, and its place in a tuple
# Caches what a function makes of tokens, its first argument.
cached_by_search_tokens = cached_search_tensors_within(TABLE_BYTES, lambda token_ids, *_: BYTES_OF_ID * len(token_ids))


class SearchTokenIds(tuple[int, ...]):
    """Tokens that are looked up at every step: hashed once, and pickled as bytes."""

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Callable[[bytes], SearchTokenIds], tuple[bytes]]:
        return _search_token_ids, (np.array(self, np.int64).tobytes(),)

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()


def _search_token_ids(content: bytes) -> SearchTokenIds:
    return SearchTokenIds(np.frombuffer(content, np.int64).tolist())


@cached_by_search_tokens
def search_token_columns(token_ids: tuple[int, ...], vocab_size: int, device: torch.device) -> torch.Tensor:
    """[n] int64, the tokens that are in the vocabulary. Read-only."""
    return uploaded_for_search(_search_tokens_in_vocabulary(token_ids, vocab_size), device)


@cached_by_search_tokens
def search_token_classes(
    token_ids: tuple[int, ...], of_these: int, vocab_size: int, device: torch.device
) -> torch.Tensor:
    """[V] int8, `of_these` for the given tokens, 0 for all others. Read-only."""
    table = np.zeros(vocab_size, np.int8)
    table[_search_tokens_in_vocabulary(token_ids, vocab_size)] = of_these
    return uploaded_for_search(table, device)


def _search_tokens_in_vocabulary(token_ids: tuple[int, ...], vocab_size: int) -> np.ndarray:
    every = np.array(token_ids, dtype=np.int64)
    return every[(every >= 0) & (every < vocab_size)]
