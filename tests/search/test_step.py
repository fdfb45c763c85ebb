"""One step of beam search decides what a loop over the candidates decides."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_trie.search.step import (
    Candidates,
    Step,
    Tops,
    assign_slots,
    hf_step,
    num_candidates,
    tridecode_step,
    vllm_step,
)

Candidate = tuple[int, int, float]  # parent, token, score

DEAD = float("-inf")
property_test = settings(max_examples=500, deadline=None, derandomize=True)
widths = st.integers(1, 9)
stop_rates = st.sampled_from([0.0, 0.1, 0.4, 0.7, 1.0])
seeds = st.integers(0, 1 << 32)


def random_candidates(choose: random.Random, groups: int, width: int, count: int) -> Candidates:
    """Different continuations in total order, with many ties; some or all of them may be impossible."""
    ranked = []
    for _ in range(groups):
        num_rows, vocab_size = choose.choice([(1, count), (width, 20)])
        pairs = choose.sample([*product(range(num_rows), range(vocab_size))], count)
        num_dead = choose.choice([0, 0, choose.randint(0, count)])
        scores = [DEAD] * num_dead + [-choose.randrange(2 * count) / 2 for _ in pairs[num_dead:]]
        scored = zip(scores, pairs, strict=True)
        ranked.append(sorted(((score, *pair) for score, pair in scored), key=lambda c: (-c[0], *c[1:])))
    scores, parents, tokens = np.moveaxis(np.array(ranked), -1, 0)
    return Candidates(parents.astype(np.int64), tokens.astype(np.int64), scores.astype(np.float32))


def random_mask(choose: random.Random, like: np.ndarray, rate: float) -> np.ndarray:
    return np.array([choose.random() < rate for _ in range(like.size)]).reshape(like.shape)


def listed(candidates: Candidates) -> list[Candidate]:
    """Those of one group that are possible at all."""
    return [c for c in zip(*(field.tolist() for field in candidates), strict=True) if c[-1] > DEAD]


def best_by_loop(candidates: list[Candidate], keys: list[float], barred: list[bool], width: int) -> list[Candidate]:
    """The `width` with the greatest keys among those not barred, the earlier one on a tie."""
    allowed = [i for i in range(len(candidates)) if not barred[i] and keys[i] > DEAD]
    return [candidates[i] for i in sorted(allowed, key=lambda i: -keys[i])[:width]]


def check_beams(step: Step, live: list[Candidate], width: int) -> None:
    """One group's beams are `live`, best first, each first child in its parent's slot; all other slots are dead."""
    assert step.scores.shape == (width,)
    assert step.scores.dtype == np.float32
    assert Counter(listed(Candidates(step.parents, step.tokens, step.scores))) == Counter(live)
    for place, (parent, token, _) in enumerate(live):
        if parent not in [earlier[0] for earlier in live[:place]]:
            assert (step.parents[parent], step.tokens[parent]) == (parent, token)
    assert set(step.parents.tolist()) <= set(range(width))
    destinations = {slot for slot, parent in enumerate(step.parents.tolist()) if slot != parent}
    assert destinations.isdisjoint(step.parents.tolist()), "a row would be overwritten before it is copied"


@property_test
@given(seeds, st.integers(1, 3), widths, st.integers(0, 3), stop_rates, st.booleans())
def test_hf_step_decides_what_a_loop_decides(
    seed: int, groups: int, width: int, num_stops: int, rate: float, is_last: bool
) -> None:
    choose = random.Random(seed)
    candidates = random_candidates(choose, groups, width, num_candidates(width, num_stops))
    stops = random_mask(choose, candidates.tokens, rate)
    steps = hf_step(candidates, stops, width, is_last)
    for group in range(groups):
        step = steps.group(group)
        every = [*zip(*(field[group].tolist() for field in candidates), strict=True)]
        barred = stops[group].tolist()
        assert step.is_finished.all()
        assert listed(step.finished) == [
            c for c, stop in zip(every[:width], barred, strict=False) if (stop or is_last) and c[-1] > DEAD
        ]
        check_beams(step, best_by_loop(every, [c[-1] for c in every], barred, width), width)


@property_test
@given(seeds, st.integers(1, 3), widths, stop_rates, st.sampled_from([0.5, 1.0, 1.5]), st.booleans())
def test_vllm_step_decides_what_a_loop_decides(
    seed: int, groups: int, width: int, rate: float, factor: float, is_last: bool
) -> None:
    choose = random.Random(seed)
    candidates = random_candidates(choose, groups, width, 2 * width)
    stopping = random_candidates(choose, groups, width, width + choose.randint(0, 5))
    merits = np.where(candidates.tokens % 3 == 0, np.float32(factor), np.float32(1)) * candidates.scores
    stops, is_stopping = (random_mask(choose, c.tokens, rate) for c in (candidates, stopping))
    steps = vllm_step(candidates, merits, stops, stopping, is_stopping, width, is_last)
    for group in range(groups):
        step = steps.group(group)
        every = [*zip(*(field[group].tolist() for field in candidates), strict=True)]
        live = best_by_loop(every, merits[group].tolist(), stops[group].tolist(), width)
        offered = zip(*(field[group].tolist() for field in (*stopping, is_stopping)), strict=True)
        ended = [tuple(candidate) for *candidate, stop in offered if stop]
        check_beams(step, live, width)
        assert step.is_finished.all()
        finished = [*zip(*(field.tolist() for field in step.finished), strict=True)]
        assert finished[: len(ended)] == ended
        ended_by_length = finished[len(ended) :]
        assert Counter(ended_by_length) == Counter(live if is_last else [])
        assert [c[-1] for c in ended_by_length] == sorted((c[-1] for c in ended_by_length), reverse=True)


@property_test
@given(seeds, st.integers(2, 4), widths, stop_rates, st.booleans())
def test_groups_do_not_see_each_other(seed: int, groups: int, width: int, rate: float, is_last: bool) -> None:
    choose = random.Random(seed)
    candidates = random_candidates(choose, groups, width, 2 * width)
    stops = random_mask(choose, candidates.tokens, rate)

    def steps(of: slice) -> list[Step]:
        part, part_stops = Candidates(*(field[of] for field in candidates)), stops[of]
        in_vllm = vllm_step(part, part.scores, part_stops, part, part_stops, width, is_last)
        return [step(part, part_stops, width, is_last) for step in (hf_step, tridecode_step)] + [in_vllm]

    for group in range(groups):
        for together, alone in zip(steps(slice(None)), steps(slice(group, group + 1)), strict=True):
            for one, other in zip(flat(together.group(group)), flat(alone.group(0)), strict=True):
                np.testing.assert_array_equal(one, other)


def flat(step: Step) -> tuple[np.ndarray, ...]:
    return (step.parents, step.tokens, step.scores, *step.finished, step.is_finished)


@st.composite
def parents_of_groups(draw: st.DrawFn) -> np.ndarray:
    width = draw(widths)
    group = st.lists(st.integers(0, width - 1), min_size=width, max_size=width)
    return np.array(draw(st.lists(group, min_size=1, max_size=3)))


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


@pytest.mark.parametrize("rank", range(6))
def test_stop_finishes_only_among_the_best_width(rank: int) -> None:
    tokens = [10, 11, 12, 13, 14, 15]
    tokens[rank] = 1
    step = step_of(parents=[0, 1, 2, 0, 1, 2], tokens=tokens, width=3)
    assert step.finished.tokens.tolist() == [1] * (rank < 3)
    assert sorted(step.tokens) == [token for token in tokens if token != 1][:3]


def test_in_the_last_step_the_best_width_finish_and_no_other() -> None:
    step = step_of(parents=[0, 1, 1, 0], tokens=[10, 1, 12, 13], width=2, is_last=True)
    assert step.finished.tokens.tolist() == [10, 1]


def test_beams_go_on_when_all_the_best_finish() -> None:
    step = step_of(parents=[2, 0, 1, 2, 2, 0], tokens=[1, 1, 1, 7, 8, 9], width=3)
    assert step.finished.parents.tolist() == [2, 0, 1]
    assert step.tokens.tolist() == [9, 8, 7]
    assert step.parents.tolist() == [0, 2, 2]


def test_one_beam_takes_the_best_that_does_not_stop() -> None:
    step = step_of(parents=[0, 0], tokens=[1, 7], width=1)
    assert (step.parents.tolist(), step.tokens.tolist(), step.finished.tokens.tolist()) == ([0], [7], [1])


def test_slots_are_dead_where_too_few_go_on() -> None:
    step = step_of(parents=[0, 1, 2, 1, 0, 2], tokens=[1, 1, 1, 7, 1, 1], width=3)
    assert step.scores.tolist() == [DEAD, -3.0, DEAD]
    assert step.tokens[1] == 7


def test_whatever_is_alive_displaces_the_dead() -> None:
    scores = np.array([[-1.0, -2.0, DEAD, DEAD]], dtype=np.float32)  # both children of the only live beam
    candidates = Candidates(np.array([[1, 1, 0, 0]]), np.array([[5, 6, 7, 8]]), scores)
    step = hf_step(candidates, np.zeros((1, 4), dtype=bool), 2, False).group(0)
    assert (step.parents.tolist(), step.tokens.tolist(), step.scores.tolist()) == ([1, 1], [6, 5], [-2.0, -1.0])


def test_group_carries_the_tops_it_is_given() -> None:
    tops = Tops(np.zeros((1, 2), dtype=np.int32), np.zeros((1, 2), dtype=np.float32))
    candidates = Candidates(np.zeros((1, 2), dtype=int), np.array([[1, 2]]), np.zeros((1, 2), dtype=np.float32))
    step = hf_step(candidates, np.zeros((1, 2), dtype=bool), 1, False)
    assert step.group(0, tops).tops is tops
    assert step.group(0).tops is None


@pytest.mark.parametrize(("num_stops", "expected"), [(0, 6), (1, 6), (2, 9), (3, 12)])
def test_candidates_leave_width_beams_whatever_stops(num_stops: int, expected: int) -> None:
    assert num_candidates(3, num_stops) == expected
    assert expected - 3 * num_stops >= 3


def step_of(parents: list[int], tokens: list[int], width: int, is_last: bool = False) -> Step:
    """transformers' step of one group; token 1 stops, and each candidate scores one less than the one before."""
    scores = -np.arange(len(tokens), dtype=np.float32)
    candidates = Candidates(np.array([parents]), np.array([tokens]), scores[None])
    return hf_step(candidates, candidates.tokens == 1, width, is_last).group(0)
