"""Phrases are checked against what hypotheses may hold, and stop tokens are looked through once for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllm_trie.entrypoints.requests.phrases import check_request_phrases


class Watched(tuple[int, ...]):
    """Stop tokens that count how often they are looked through."""

    num_looks = 0

    def __iter__(self) -> Iterator[int]:
        Watched.num_looks += 1
        return super().__iter__()


def test_stop_tokens_are_looked_through_once_for_all_phrases() -> None:
    boosts = [([[1, 2], [3, 4, 5]], 1.0), ([6, 7], 1.0)]
    found = [([[1, 2], [3, 4, 5]], 1.0), ([[6, 7]], 1.0)]
    Watched.num_looks = 0
    check_request_phrases(boosts, found, 10, Watched(range(7, 10)))
    assert Watched.num_looks == 1
    with pytest.raises(ValueError, match="goes on after a stop token"):
        check_request_phrases(boosts, found, 10, Watched([4]))
