"""Ranks that decide alike pass; those that do not are named, with the group they disagree about."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_trie.messages import DecidedMessage
from vllm_trie.search.rank import SearchCandidates
from vllm_trie.search.step_result import SearchStepResult
from vllm_trie.speculation.search.forest import Forest
from vllm_trie.worker.rank_check import disputes_of_worker_ranks, worker_ranks_as_text


def decided(parents: list[int], tokens: list[int], scores: tuple[float, ...] = (-1.0, -2.0)) -> str:
    nothing = SearchCandidates(np.zeros(0), np.zeros(0), np.zeros(0))
    step = SearchStepResult(np.array(parents), np.array(tokens), np.array(scores), nothing)
    return worker_ranks_as_text(DecidedMessage([step, step]).as_arrays())


def test_ranks_that_decide_the_same_agree() -> None:
    same = [{"a": decided([0, 1], [7, 8]), "b": decided([1, 1], [7, 8])} for _ in range(3)]
    assert disputes_of_worker_ranks(same) == []
    assert disputes_of_worker_ranks([{}, {}]) == []
    rounded = decided([0, 1], [7, 8], scores=(-1.0000001, -2.0))
    assert disputes_of_worker_ranks([{"a": decided([0, 1], [7, 8])}, {"a": rounded}]) == [], "rounding is no decision"


@pytest.mark.parametrize(
    "other", [decided([1, 0], [7, 8]), decided([0, 1], [8, 7]), decided([0], [7]), decided([0, 1], [7, 9])]
)
def test_a_rank_that_decides_otherwise_is_named_with_its_group(other: str) -> None:
    usual = {"a": decided([0, 1], [7, 8]), "b": decided([0, 1], [7, 8])}
    found = disputes_of_worker_ranks([usual, {**usual, "b": other}, usual, usual])
    assert found == ["beam group 'b' (ranks 0, 2, 3 against rank 1)"]


def test_a_group_that_not_all_ranks_have_is_disputed() -> None:
    one = {"a": decided([0, 1], [7, 8])}
    assert (
        disputes_of_worker_ranks([one, {}])
        == disputes_of_worker_ranks([{}, one])
        == ["beam group 'a' (rank 0 against rank 1)"]
    )


def test_forests_differ_by_any_node_and_by_where_it_grows() -> None:
    def grown(*nodes: tuple[int, int]) -> str:
        forest = Forest([3, 4], max_drafts=8)
        for parent, token in nodes:
            forest.add(parent, token)
        return worker_ranks_as_text(forest.as_arrays())

    forests = [grown(), grown((0, 5)), grown((1, 5)), grown((0, 6)), grown((0, 5), (1, 5)), grown((1, 5), (0, 5))]
    assert len({*forests}) == len(forests)
    assert grown((0, 5), (2, 6)) == grown((0, 5), (2, 6))
