"""However many tokens stop hypotheses, a step takes as much work, and decides as for few."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.launch_counter import LaunchCounter
from benchmarks.memory_counter import MemoryCounter
from benchmarks.weightless import nowhere
from tests.support.items import along_of, random_items
from tests.support.steps import rules_of, steps_of
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.catalog import ItemConstraint
from vllm_trie.search.constraints.stops import BARRED, ENDS, GOES_ON, StopConstraints
from vllm_trie.search.devices import cached_search_tensors_within, pinned_search_tensors
from vllm_trie.search.filters import SearchFilters, SearchPruning
from vllm_trie.search.group_pools import SearchGroupPools
from vllm_trie.search.rules import SearchStrategy
from vllm_trie.search.step import take_packed_search_step, take_search_step
from vllm_trie.search.step_result import SearchStepResult, SearchTokenLogprobs
from vllm_trie.search.stopping import EndedSearchHypotheses, HfSearchPool, VllmSearchPool, are_search_tokens_among
from vllm_trie.search.strategies import best, best_continuations, few_ends
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.search.strategies.in_groups import DiverseGroupsStrategy
from vllm_trie.search.token_tables import CPU, SearchTokenIds

WIDTH, VOCAB_SIZE = 16, 32_768
FEW, MANY, MOST = 3, 6_000, 32_000
STRATEGIES: dict[str, SearchStrategy] = {
    **{semantics: BestStrategy(semantics) for semantics in ("hf", "vllm", "tridecode")},
    "an ignored EOS": BestStrategy("vllm", (0, 1.1)),
    "in groups": DiverseGroupsStrategy(4, 0.5, None),
}


class Many(frozenset[int]):
    """So many that nobody may go over all of them."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("goes over all of them")


class Work(NamedTuple):
    operations: int
    moved: int  # bytes that operations read and write
    held: int  # bytes at a time
    size: int  # of what goes to the host


def work_of(strategy: SearchStrategy, num_stops: int, is_last: bool) -> Work:
    rules = rules_of(WIDTH, stops=tuple(range(5, 5 + num_stops)), strategy=strategy, is_last=is_last)
    logits = nowhere(1, WIDTH, VOCAB_SIZE, dtype=torch.float32)
    beams = SearchBeams(nowhere(1, WIDTH, dtype=torch.float32))
    take_search_step(rules, logits, beams)  # which uploads tables
    with MemoryCounter() as memory, LaunchCounter() as counter:
        words = take_packed_search_step(rules, logits, beams).words
    assert counter.copies == counter.waits == 0
    return Work(len(counter.operations), counter.num_bytes, memory.most, words.shape[1])


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_work_of_a_step_does_not_grow_with_stop_tokens(strategy: SearchStrategy, is_last: bool) -> None:
    few, many, most = (work_of(strategy, num_stops, is_last) for num_stops in (FEW, MANY, MOST))
    assert most == many  # two rankings
    assert many.operations <= 2 * few.operations + 5  # which join them
    assert many.moved <= 3 * few.moved
    assert many.held <= 2 * few.held
    assert many.size <= few.size


def test_a_pool_looks_up_the_last_tokens_of_hypotheses_alone() -> None:
    in_groups = SearchGroupPools([HfSearchPool(2, 0.0, 3, early_stopping=False) for _ in range(2)], Many({1}))
    outdone, is_over = in_groups.advance(
        EndedSearchHypotheses.of([-1.0, -2.0], [1, 5], [0, 1], [0, 2]), np.full(4, -9.0), 3
    )
    assert (outdone.tolist(), is_over) == ([], False)
    assert in_groups.best(2).leaves.tolist() == [0, 1]
    of_vllm = VllmSearchPool(2, 1.0, 3, 0, Many({1}))
    assert of_vllm.scores(np.array([-6.0, -6.0]), 3, np.array([1, 5])).tolist() == [-3.0, -2.0]
    assert are_search_tokens_among(np.zeros(0, np.int64), Many({1})).tolist() == []


def decided(step: SearchStepResult) -> str:
    """All of a step, but the tokens of slots without a beam, which are any."""
    lives = step.scores > -np.inf
    own = step.beam_logprobs and SearchTokenLogprobs(*(field[lives] for field in step.beam_logprobs))
    return repr(step._replace(tokens=step.tokens[lives], beam_logprobs=own))


@settings(max_examples=70, derandomize=True)
@given(st.data(), st.sampled_from(["hf", "vllm", "tridecode", "in groups"]))
def test_what_stops_may_be_ranked_apart_or_not(data: st.DataObject, name: str) -> None:
    vocab_size = data.draw(st.sampled_from([5, 40, 700]))
    width = 2 * data.draw(st.integers(1, 3))
    num_rows = data.draw(st.sampled_from([1, width]))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 32)))
    logits = torch.randint(data.draw(st.sampled_from([2, 5, 1000])), (2, num_rows, vocab_size), generator=random) / 3
    tokens = st.integers(0, vocab_size + 2)  # some are in no vocabulary
    rules = rules_of(
        width,
        stops=tuple(sorted(data.draw(st.sets(tokens, max_size=vocab_size)))),
        strategy=DiverseGroupsStrategy(2, 0.5, 1) if name == "in groups" else STRATEGIES[name],
        is_last=data.draw(st.booleans()),
        num_logprobs=data.draw(st.sampled_from([None, 2])),
        filters=data.draw(st.sampled_from([SearchFilters(), SearchFilters(0.8, 0.05, 0, 0.9)])),
        pruning=data.draw(st.sampled_from([SearchPruning(), SearchPruning(per_parent=3)])),
    )
    scores = -torch.randint(3, (2, num_rows), generator=random) / 2
    found = []
    for few in (0, 1000):
        with patch.object(best, "FEW_STOPS", few):
            found.append([decided(step) for step in steps_of(rules, logits, scores)])
    assert found[0] == found[1]


ITEMS = random_items(40, (1, 2, 3), seed=5, tokens=(2, 30))


@settings(max_examples=40, derandomize=True)
@given(st.data())
def test_of_many_stop_tokens_after_items_those_that_may_matter_are_enough(data: st.DataObject) -> None:
    width, levels = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([3, 1000]))
    item_rules = ItemConstraint("", ends_with_stop=True, renormalizes=data.draw(st.booleans()))
    stops = tuple(sorted(data.draw(st.sets(st.integers(0, 49), min_size=1))))
    along = along_of(ITEMS, item_rules, stops)
    rules = rules_of(
        width,
        stops=stops,
        constraints=(item_rules,),
        is_last=data.draw(st.booleans()),
        filters=data.draw(st.sampled_from([SearchFilters(), SearchFilters(1.0, 0.01, 0, 0.8)])),
        pruning=data.draw(st.sampled_from([SearchPruning(), SearchPruning(per_parent=2), SearchPruning(per_parent=6)])),
    )
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 32)))
    logits = torch.randint(levels, (1, width, 50), generator=random) * (4 / levels)
    scores = -torch.randint(2, (1, width), generator=random) / 2
    states = torch.randint(along.trie.num_nodes, (1, width), generator=random)
    found = []
    for kept in (few_ends.few_ends_for_strategy, lambda fields, *_: fields):
        with patch.object(best_continuations, "few_ends_for_strategy", kept):
            found.append([decided(step) for step in steps_of(rules, logits, scores, (along, states))])
    assert found[0] == found[1]


def test_tables_name_the_class_of_every_token() -> None:
    stops = StopConstraints((2, 4, 99), ignored_token_ids=(1,))
    assert stops.classes(6, CPU).tolist() == [GOES_ON, GOES_ON, ENDS, GOES_ON, ENDS, GOES_ON]
    assert stops.columns(6, CPU).tolist() == [2, 4]
    barring = stops._replace(are_barred=True)
    assert barring.classes(6, CPU).tolist() == [GOES_ON, BARRED, BARRED, GOES_ON, BARRED, GOES_ON]
    assert barring.columns(6, CPU).tolist() == []
    tokens = np.array([[-1, 1, 2], [3, 4, 99]])
    assert stops.lead_nowhere(tokens).tolist() == [[False, False, True], [False, True, True]]
    assert barring.lead_nowhere(tokens).tolist() == [[False, True, True], [False, True, True]]


def test_token_ids_are_hashed_once_and_equal_to_a_tuple_of_them() -> None:
    token_ids = SearchTokenIds(range(5))
    assert token_ids == tuple(range(5))
    assert hash(token_ids) == hash(tuple(range(5)))
    with patch.object(SearchTokenIds, "__iter__", side_effect=AssertionError):
        assert hash(token_ids) == hash(StopConstraints(token_ids).token_ids)
    sent = pickle.loads(pickle.dumps(token_ids))
    assert sent == token_ids
    assert type(sent) is SearchTokenIds
    many = SearchTokenIds(range(100_000, 200_000))
    assert len(pickle.dumps(many)) < 9 * len(many)


def test_tables_stay_as_far_as_their_bytes_go() -> None:
    made = list[int]()

    @cached_search_tensors_within(100, lambda number: 16)
    def table(number: int) -> torch.Tensor:
        made.append(number)
        return torch.full((8,), number)  # 64 bytes

    first = table(1)
    assert table(1) is first
    with pinned_search_tensors() as tensors:
        assert table(1) is first
    assert tensors[0] is first
    table(2)
    table(2)
    assert table(1) is not first
    assert made == [1, 2, 1]
