"""Where each item counts once, a search finds what a plain loop finds, and all items where it is wide enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.request import Request

from tests.support.items import Item
from tests.support.unique_items import Along, LogprobsOf, agree, all_items, loop_unique_items
from vllm_trie.catalog import Catalog
from vllm_trie.engine.catalogs import EngineCatalogs
from vllm_trie.engine.group import BeamGroup
from vllm_trie.engine.new_group import new_group
from vllm_trie.engine.unique_catalog_items import (
    MOST_ENDING,
    num_engine_ending_along,
    widest_engine_search_of_unique_items,
)
from vllm_trie.messages import GroupTicketMessage
from vllm_trie.options import BeamParams
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.catalog import ConstraintTrie
from vllm_trie.search.step import take_packed_search_step
from vllm_trie.search.step_result import unpack_search_steps

VOCAB, STOPS, AFTER, MAX_TOKENS = 10, (8, 9), 7, 7
Sequences = dict[Item, int]


def table(seed: int, sureness: float = 1.5) -> LogprobsOf:
    """A model that is a table of random numbers, one row for each history."""

    @cache
    def logprobs_of(tokens: Item) -> Sequence[float]:
        logits = np.random.default_rng([seed, len(tokens), *tokens]).normal(0, sureness, VOCAB)
        return torch.tensor(logits, dtype=torch.float32).log_softmax(-1).tolist()

    return logprobs_of


class Searched:
    """A whole search by torch's steps, as scheduler and worker take it."""

    def __init__(self, sequences: Sequences, logprobs_of: LogprobsOf, max_tokens: int = MAX_TOKENS, **options: Any):
        catalog = Catalog.from_sequences([*sequences], [*sequences.values()])
        params = BeamParams(catalog="items", catalog_unique=True, **options)
        use = EngineCatalogs({}, 1 << 20).use(params, GroupTicketMessage(1, None, item_set=catalog.to_bytes()))
        sampling = SamplingParams(stop_token_ids=[*STOPS], ignore_eos=True, max_tokens=max_tokens)
        ticket = GroupTicketMessage(params.beam_width, None)
        self.group = new_group(Request("g", [5], sampling, None), params, ticket, 512, False, use)
        arrays = (torch.tensor(array) for array in (catalog.first_child, catalog.tokens, catalog.is_item))
        trie = ConstraintTrie(*arrays, catalog.most_children, catalog.tokens_by_depth())
        along = use.rules.on({use.rules.catalog: trie}, STOPS)
        beams, cpu = SearchBeams(torch.zeros(1, 1)), torch.device("cpu")
        beams = beams._replace(states={along: along.begin(1, cpu)})
        while True:
            rules = self.group.plan.search.in_phase(self.group.next_phase())
            histories = map(tuple, self.group.hypotheses.histories().tolist())
            rows = [logprobs_of(tokens) for tokens in histories]
            taken = take_packed_search_step(rules, torch.tensor(rows)[None], beams)
            (step,) = unpack_search_steps(taken.words.numpy(), taken.layout)
            if self.group.advance(step):
                return
            self.group.check_invariants()
            beams = beams.after(taken.going)

    @property
    def found(self) -> list[tuple[float, Item]]:
        best = self.group.best(self.group.plan.params.beam_width)
        return [(score, tuple(tokens)) for score, tokens in zip(best.scores.tolist(), best.token_ids, strict=True)]


def found_by(group: BeamGroup, leaves: Any) -> list[Item]:
    return [tuple(tokens) for tokens in group.hypotheses.tokens(leaves)]


@st.composite
def sets(draw: st.DrawFn) -> tuple[Along, dict[str, Any]]:
    """Sequences, few of them with ids of their own, what hypotheses of them are, and the options that say so."""
    num_items, after = draw(st.sampled_from([1, 1, 1, 2, 3])), draw(st.sampled_from([None, None, AFTER]))
    ends = draw(st.booleans())
    lengths = st.integers(2, 2) if num_items > 1 else st.integers(1, 4)
    tokens = lengths.flatmap(lambda length: st.tuples(*[st.integers(0, 5)] * length))
    sequences = draw(st.dictionaries(tokens, st.integers(0, 4), min_size=1, max_size=5 if num_items > 1 else 24))
    options = {"catalog_items": num_items, "catalog_after": after, "catalog_stop": ends}
    return Along(sequences, num_items, after, STOPS if ends else (), STOPS), options


def ways_to_search() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "length_penalty": st.sampled_from([0.0, 1.0, 2.0, -1.0]),
            "early_stopping": st.sampled_from([False, True, "never"]),
        }
    )


def check_narrow(asked: tuple[Along, dict[str, Any]], widths: list[int], how: dict[str, Any], seed: int) -> Searched:
    along, options = asked
    searched = Searched(along.sequences, table(seed), beam_widths=widths, beam_width=max(widths), **options, **how)
    agree(searched.found, loop_unique_items(along, table(seed), widths, MAX_TOKENS, **how))
    return searched


all_widths = st.integers(1, 6).map(lambda width: [width]) | st.lists(st.integers(1, 6), min_size=1, max_size=5)


def check_searches_of_all_widths(max_examples: int) -> None:
    num_extended = 0

    @settings(max_examples=max_examples, derandomize=True)
    @given(sets(), all_widths, ways_to_search(), st.integers(0, 1000))
    def search(asked: tuple[Along, dict[str, Any]], widths: list[int], how: dict[str, Any], seed: int) -> None:
        nonlocal num_extended
        num_extended += check_narrow(asked, widths, how, seed).group.plan.search.num_ending is not None

    search()
    assert num_extended > max_examples / 4


def test_steps_narrower_than_the_search_find_different_items() -> None:
    """Two sequences of one item come before the other item, and as many as the catalog has fit into the last step."""
    along = Along({(1,): 0, (2,): 0, (3,): 1}), {}
    for seed in range(8):
        check_narrow(along, [2, 3], {"length_penalty": 1.0, "early_stopping": False}, seed)


def test_a_search_finds_what_a_plain_loop_finds() -> None:
    check_searches_of_all_widths(60)


@pytest.mark.nightly
def test_many_searches_find_what_a_plain_loop_finds() -> None:
    check_searches_of_all_widths(3000)


@settings(max_examples=30)
@given(sets(), ways_to_search(), st.integers(0, 1000))
def test_a_search_that_is_wide_enough_finds_all_items(
    asked: tuple[Along, dict[str, Any]], how: dict[str, Any], seed: int
) -> None:
    along, options = asked
    along = Along(along.sequences, along.num_items, None, along.stops)
    width = len([*along.whole()]) + 1
    options = options | {"catalog_after": None}
    searched = Searched(along.sequences, table(seed), 12, beam_width=width, **options, **how)
    assert searched.group.plan.search.num_ending is None  # it needs no more than any search
    agree(searched.found, all_items(along, table(seed), width, how["length_penalty"]))


def test_items_of_one_length_fill_the_answer_though_their_other_sequences_are_better() -> None:
    """All end in one step, of which the first `beam_width` continuations are one item's."""
    names = {(1, token): 0 for token in range(6)} | {(2, token): 1 + token for token in range(6)}
    likely = math.log(0.9), math.log(0.01)

    def logprobs_of(tokens: Item) -> Sequence[float]:
        return [likely[token != 1] if not tokens else math.log(0.1) - 0.001 * token for token in range(VOCAB)]

    (_, first), *others = Searched(names, logprobs_of, beam_width=4).found
    assert [first, *(tokens for _, tokens in others)] == [(1, 0), (2, 0), (2, 1), (2, 2)]


CROWDED: dict[str, tuple[Along, dict[str, Any], list[dict[int, float]]]] = {  # and which tokens a model likes by place
    "texts before it": (
        Along({(4,): 0, (5,): 1, (6,): 2}, after=AFTER, barred=STOPS),
        {"catalog_after": AFTER},
        [{0: 9, 1: 9, 2: 9}, {AFTER: 9}, {4: 9, 5: 8, 6: 7}],
    ),
    "sequences": (Along({(1,): 0, (2,): 0, (3,): 1, (4,): 1, (5,): 2}), {}, [{1: 9, 2: 9, 3: 8, 4: 8, 5: 7}]),
    "sequences of the item before it": (
        Along({(1,): 0, (2,): 0, (3,): 1, (4,): 2}, 2),
        {"catalog_items": 2},
        [{1: 9, 2: 9}, {1: 9, 2: 9, 3: 8, 4: 7}],
    ),
    "stop tokens": (
        Along({(1,): 0, (2,): 1, (3,): 2}, stops=STOPS),
        {"catalog_stop": True},
        [{1: 9, 2: 7, 3: 5}, {8: 9, 9: 9}],
    ),
}


@pytest.mark.parametrize("case", CROWDED)
def test_as_many_items_are_found_as_there_are_beams_however_often_each_comes(case: str) -> None:
    """Three items for three beams: the first two of them come as often as they can before the third one."""
    along, options, liked = CROWDED[case]

    @cache
    def logprobs_of(tokens: Item) -> Sequence[float]:
        logits = np.random.default_rng([0, *tokens]).normal(0, 0.01, VOCAB)
        logits[[*liked[len(tokens)]]] += [*liked[len(tokens)].values()]
        return torch.tensor(logits, dtype=torch.float32).log_softmax(-1).tolist()

    searched = Searched(along.sequences, logprobs_of, len(liked), beam_width=3, **options)
    agree(searched.found, loop_unique_items(along, logprobs_of, [3], len(liked)))
    assert len(searched.found) == 3


def test_a_better_sequence_takes_the_place_of_its_item_and_a_worse_one_takes_none() -> None:
    names = {(1,): 0, (2, 1): 0, (2, 2): 1, (2, 3): 1}
    found = Searched(names, table(3), beam_width=4).found
    expected = all_items(Along(names), table(3), 4, 1.0)
    agree(found, expected)
    assert len(found) == 2


@pytest.mark.parametrize("num_groups", [2, 3])
@pytest.mark.parametrize("ends_with_stop", [False, True])
def test_an_item_of_several_groups_of_beams_comes_back_once(num_groups: int, ends_with_stop: bool) -> None:
    names = {(first, second): (first + second) % 5 for first in range(5) for second in range(6)}
    num_twice = 0
    for seed in range(20):
        how = {"num_beam_groups": num_groups, "diversity_penalty": 0.3, "beam_width": 2 * num_groups}
        searched = Searched(names, table(seed), catalog_stop=ends_with_stop, **how)
        pools = searched.group.pool.pools  # type: ignore[attr-defined]
        of_groups = [found_by(searched.group, pool.best(9).leaves) for pool in pools]
        assert all(len(of_group) == len({names[tokens[:2]] for tokens in of_group}) for of_group in of_groups)
        if not ends_with_stop:  # else both beams of a group may wait to end as one item
            assert all(len(of_group) == 2 for of_group in of_groups)
        ids = [names[tokens[:2]] for _, tokens in searched.found]
        assert {*ids} == {names[tokens[:2]] for of_group in of_groups for tokens in of_group}
        assert len(ids) == len({*ids})
        assert [score for score, _ in searched.found] == sorted((s for s, _ in searched.found), reverse=True)
        num_twice += len(ids) < 2 * num_groups
    assert num_twice > 5


def test_what_runs_is_the_same_item_as_what_is_finished_where_a_search_ends_early() -> None:
    """`[1, 2]` is finished and goes on; what goes on as another name of a finished item, and is worse, is left out."""
    names = {(1, 2): 5, (3, 4): 5, (3, 4, 6): 6, (1, 2, 3): 7, (0, 1, 2): 8}
    searched = Searched(names, table(0), 2, beam_width=5)
    so_far = searched.group.best_so_far(9)
    ids = [names.get(tuple(tokens)) for tokens in so_far.token_ids]
    assert sorted(each for each in ids if each is not None) == [5]
    assert ids.count(None) >= 1  # no whole item is the same as nothing


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 3 * 3 + 1),
        ({"beam_width": 1}, None),
        ({"beam_width": 30}, None),  # as many as there are sequences
        ({"catalog_stop": True}, 3 * 3 * 2 + 1),
        ({"catalog_items": 2}, 3 * 3 * 3 + 1),
        ({"catalog_items": 5}, 3 * 3 * 4 + 1),  # of four beams each
        ({"catalog_after": AFTER}, 3 * 3 * 4 + 1),
        ({"num_beam_groups": 2, "diversity_penalty": 1.0}, 3 + 1),
    ],
)
def test_a_step_looks_at_as_many_continuations_as_may_be_the_same(options: dict[str, Any], expected: int) -> None:
    catalog = Catalog.from_sequences([[number % 6, number // 6] for number in range(20)], [n // 3 for n in range(20)])
    beam = BeamParams(catalog="items", catalog_unique=True, **{"beam_width": 4} | options)
    num_beams = min(beam.beam_width, 20)
    assert num_engine_ending_along(beam, catalog, num_beams, len(STOPS)) == expected


@pytest.mark.parametrize(
    ("options", "ids", "widest"),
    [
        ({"beam_width": 4_000}, 5_000, 4_000),  # four sequences each: 15,997
        ({"beam_width": 4_000}, 500, 410),  # 40 each
        ({"beam_width": 20_000}, 500, 20_000),  # as many beams as sequences
        ({"beam_width": 1 << 62, "catalog_after": 7}, 500, 20),  # whatever a client asks
        ({"beam_width": 300, "catalog_after": 7}, 20_000, 128),  # one each, after texts that differ
        ({"beam_width": 300, "num_beam_groups": 2, "diversity_penalty": 1.0, "catalog_after": 7}, 20_000, 182),
    ],
)
def test_the_widest_search_is_told(options: dict[str, Any], ids: int, widest: int) -> None:
    catalog = Catalog.from_sequences([[n % 64, n // 64] for n in range(20_000)], [n % ids for n in range(20_000)])
    beam = BeamParams(catalog="items", catalog_unique=True, **options)
    assert widest_engine_search_of_unique_items(beam, catalog, 1) == widest
    num_groups = beam.num_beam_groups
    for width in {widest, min(widest + num_groups, beam.beam_width)}:
        own = beam.model_copy(update={"beam_width": width})
        ending = num_engine_ending_along(own, catalog, width, 1)
        assert (ending or 0) * num_groups <= MOST_ENDING
        assert (ending == MOST_ENDING // num_groups) == (width > widest), ending
