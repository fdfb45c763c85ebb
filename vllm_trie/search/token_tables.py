"""Sets of tokens that come with requests, such as stop tokens, as tables over the vocabulary: each is uploaded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch

from vllm_trie.search.devices import kept_within, uploaded

CPU = torch.device("cpu")
MOST_TOKENS = 1 << 31  # of any vocabulary
TABLE_BYTES = 32 << 20  # of tables of each of the two kinds that stay, and of the lists by which they are found
BYTES_OF_ID = 40  # of a token in such a list: a number, and its place in a tuple


class TokenIds(tuple[int, ...]):
    """Tokens that are looked up at every step: they are hashed once, and travel to other processes as bytes."""

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Callable[[bytes], TokenIds], tuple[bytes]]:
        return _token_ids, (np.array(self, np.int64).tobytes(),)

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()


def _token_ids(content: bytes) -> TokenIds:
    return TokenIds(np.frombuffer(content, np.int64).tolist())


@kept_within(TABLE_BYTES, lambda token_ids, *_: BYTES_OF_ID * len(token_ids))
def columns(token_ids: tuple[int, ...], vocab_size: int, device: torch.device) -> torch.Tensor:
    """[n] int64, those of some tokens that a vocabulary has. Not to be written to."""
    return uploaded(_in_vocabulary(token_ids, vocab_size), device)


@kept_within(TABLE_BYTES, lambda token_ids, *_: BYTES_OF_ID * len(token_ids))
def classes(token_ids: tuple[int, ...], of_these: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """[V] int8, the class of some tokens; 0 is that of all others. Not to be written to."""
    table = np.zeros(vocab_size, np.int8)
    table[_in_vocabulary(token_ids, vocab_size)] = of_these
    return uploaded(table, device)


def _in_vocabulary(token_ids: tuple[int, ...], vocab_size: int) -> np.ndarray:
    every = np.array(token_ids, dtype=np.int64)
    return every[(every >= 0) & (every < vocab_size)]
