"""One step of beam search decides what a loop over the candidates decides."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_trie.search.step import Candidates, Step, assign_slots, beam_step, num_candidates

property_test = settings(max_examples=500, deadline=None, derandomize=True)

widths = st.integers(1, 9)
stop_token_ids = st.sets(st.integers(0, 5), max_size=3).map(lambda ids: tuple(sorted(ids)))
seeds = st.integers(0, 1 << 32)


@st.composite
def parents_of_groups(draw: st.DrawFn) -> np.ndarray:
    width = draw(widths)
    group = st.lists(st.integers(0, width - 1), min_size=width, max_size=width)
    return np.array(draw(st.lists(group, min_size=1, max_size=3)))


def random_candidates(seed: int, groups: int, width: int, stops: tuple[int, ...], bonus: float) -> Candidates:
    """Distinct continuations in total order with many ties; `bonus` lifts the stop tokens."""
    choose = random.Random(seed)
    ranked = []
    for _ in range(groups):
        num_rows, vocab_size = choose.choice([(1, 10 * width), (width, 10)])
        pairs = choose.sample([*product(range(num_rows), range(vocab_size))], num_candidates(width, len(stops)))
        scored = [(-choose.randrange(4) / 2 + bonus * (token in stops), row, token) for row, token in pairs]
        ranked.append(sorted(scored, key=lambda candidate: (-candidate[0], *candidate[1:])))
    scores, parents, tokens = np.moveaxis(np.array(ranked), -1, 0)
    return Candidates(parents.astype(np.int64), tokens.astype(np.int64), scores.astype(np.float32))


def slots_by_loop(parents: list[int]) -> list[int]:
    dead = [slot for slot in range(len(parents)) if slot not in parents]
    seen: set[int] = set()
    slots = []
    for parent in parents:
        slots.append(dead.pop(0) if parent in seen else parent)
        seen.add(parent)
    return slots


def check_step_by_loop(step: Step, candidates: list[tuple], width: int, stops: tuple[int, ...]) -> None:
    """`step` is one group's, `candidates` its (parent, token, score)."""
    live = [candidate for candidate in candidates if candidate[1] not in stops][:width]
    by_slot = dict(zip(slots_by_loop([parent for parent, _, _ in live]), live, strict=True))
    assert [*zip(step.parents, step.tokens, step.scores, strict=True)] == [by_slot[slot] for slot in range(width)]
    assert [*zip(*step.candidates, strict=True)] == candidates[:width]
    assert step.finished.tolist() == [token in stops for _, token, _ in candidates[:width]]


@property_test
@given(seeds, st.integers(1, 4), widths, stop_token_ids, st.sampled_from([-9.0, 0.0, 0.5, 9.0]))
def test_step_decides_what_a_loop_decides(
    seed: int, groups: int, width: int, stops: tuple[int, ...], bonus: float
) -> None:
    candidates = random_candidates(seed, groups, width, stops, bonus)
    step = beam_step(candidates, width, stops)
    for index in range(groups):
        one_group = [*zip(*(field[index] for field in candidates), strict=True)]
        check_step_by_loop(step.group(index), one_group, width, stops)


@property_test
@given(seeds, st.integers(2, 4), widths, stop_token_ids)
def test_groups_do_not_see_each_other(seed: int, groups: int, width: int, stops: tuple[int, ...]) -> None:
    candidates = random_candidates(seed, groups, width, stops, 0.5)
    together = beam_step(candidates, width, stops)
    for index in range(groups):
        alone = beam_step(Candidates(*(field[index : index + 1] for field in candidates)), width, stops)
        for one, other in zip(flat(together.group(index)), flat(alone.group(0)), strict=True):
            np.testing.assert_array_equal(one, other)


def flat(step: Step) -> tuple[np.ndarray, ...]:
    return (step.parents, step.tokens, step.scores, *step.candidates, step.finished)


@property_test
@given(parents_of_groups())
def test_slots_are_a_permutation(parents: np.ndarray) -> None:
    for slots in assign_slots(parents):
        assert sorted(slots) == [*range(parents.shape[1])]


@property_test
@given(parents_of_groups())
def test_first_child_stays_and_others_take_dead_slots_in_ascending_order(parents: np.ndarray) -> None:
    for slots, group in zip(assign_slots(parents).tolist(), parents.tolist(), strict=True):
        first = [group.index(parent) == child for child, parent in enumerate(group)]
        assert all(slot == parent for slot, parent, stays in zip(slots, group, first, strict=True) if stays)
        moved = [slot for slot, stays in zip(slots, first, strict=True) if not stays]
        assert moved == sorted(set(range(len(group))) - set(group))


@property_test
@given(seeds, st.integers(1, 4), widths, stop_token_ids)
def test_no_slot_is_both_source_and_destination(seed: int, groups: int, width: int, stops: tuple[int, ...]) -> None:
    for parents in beam_step(random_candidates(seed, groups, width, stops, 0.5), width, stops).parents.tolist():
        destinations = {slot for slot, parent in enumerate(parents) if slot != parent}
        assert destinations.isdisjoint(parents)


@pytest.mark.parametrize("rank", range(6))
def test_stop_token_finishes_only_among_the_best_width(rank: int) -> None:
    tokens = [10, 11, 12, 13, 14, 15]
    tokens[rank] = 1
    step = step_of(parents=[0, 1, 2, 0, 1, 2], tokens=tokens, width=3, stops=(1,))
    assert step.finished.tolist() == [rank == place for place in range(3)]
    assert sorted(step.tokens) == [token for token in tokens if token != 1][:3]


def test_beams_go_on_when_all_the_best_finish() -> None:
    step = step_of(parents=[2, 0, 1, 2, 2, 0], tokens=[1, 1, 1, 7, 8, 9], width=3, stops=(1,))
    assert step.finished.all()
    assert step.tokens.tolist() == [9, 8, 7]
    assert step.parents.tolist() == [0, 2, 2]


def test_any_of_several_stop_tokens_finishes() -> None:
    step = step_of(parents=[0, 0, 1, 1, 1, 0], tokens=[5, 2, 3, 7, 2, 8], width=2, stops=(2, 3))
    assert step.finished.tolist() == [False, True]
    assert step.tokens.tolist() == [5, 7]


def test_one_beam_takes_the_best_token_that_does_not_stop() -> None:
    step = step_of(parents=[0, 0], tokens=[1, 7], width=1, stops=(1,))
    assert (step.parents.tolist(), step.tokens.tolist(), step.finished.tolist()) == ([0], [7], [True])


def test_without_stop_tokens_nothing_finishes() -> None:
    step = step_of(parents=[1, 0, 0, 1], tokens=[1, 2, 3, 4], width=2, stops=())
    assert not step.finished.any()
    assert step.tokens.tolist() == [2, 1]


@pytest.mark.parametrize(("num_stops", "expected"), [(0, 6), (1, 6), (2, 9), (3, 12)])
def test_candidates_leave_width_beams_whatever_stops(num_stops: int, expected: int) -> None:
    assert num_candidates(3, num_stops) == expected
    assert expected - 3 * num_stops >= 3


def step_of(parents: list[int], tokens: list[int], width: int, stops: tuple[int, ...]) -> Step:
    scores = -np.arange(len(tokens), dtype=np.float32)
    candidates = Candidates(np.array([parents]), np.array([tokens]), scores[None])
    return beam_step(candidates, width, stops).group(0)
