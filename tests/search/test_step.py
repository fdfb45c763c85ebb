"""One step of the search decides what its rules say, read one by one and without tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.steps import rules_of, shortcuts, steps_of
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.stops import StopStringConstraint
from vllm_trie.search.rank import SearchCandidates
from vllm_trie.search.rules import SearchInputs, SearchRules
from vllm_trie.search.step import search_log_probabilities, take_search_step
from vllm_trie.search.step_result import SearchStepResult, pack_search_step
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.search.strategies.joint_sampling import take_strategy_cells

DEAD = float("-inf")
Continuation = tuple[int, int, float]  # parent, token, score


class Case(NamedTuple):
    """One step of some groups."""

    rules: SearchRules
    logits: torch.Tensor  # [G, r, V]
    scores: torch.Tensor  # [G, r]
    completing: frozenset[tuple[int, int]] | None  # parent and token of what completes a stop string


class Decision(NamedTuple):
    """What a step of one group must decide."""

    slots: list[tuple[int, int | None, float]]  # no token where there is no beam
    finished: list[Continuation]


def decide(case: Case, group: int) -> Decision:
    """The rules of the table of semantics in docs/semantics.md, and of the slots."""
    rules, width, going = case.rules, case.rules.width, case.rules.num_beams or case.rules.width
    masked, strategy = rules.stops.barred_token_ids, rules.strategy
    assert isinstance(strategy, BestStrategy)
    logprobs = search_log_probabilities(case.logits[group], masked)
    total = (logprobs + case.scores[group, :, None]).tolist()
    num_rows, vocab_size = logprobs.shape
    ranked = sorted((-total[p][t], p, t) for p, t in product(range(num_rows), range(vocab_size)))
    every = [(parent, token, -loss) for loss, parent, token in ranked if -loss > DEAD]

    def stops(parent: int, token: int) -> bool:
        is_stop = token in rules.stops.token_ids or (parent, token) in (case.completing or ())
        return is_stop and not rules.stops.are_barred

    going_on = [c for c in every if not stops(*c[:2])]

    def is_rows_best(parent: int, token: int) -> bool:
        row = logprobs[parent].tolist()
        return sum(other > row[token] for other in row) < 2 * width

    if strategy.semantics == "hf":
        finished = [c for c in every[:going] if stops(*c[:2]) or rules.is_last]
    elif strategy.semantics == "tridecode":
        before_last = every if len(going_on) < going else every[: every.index(going_on[going - 1])]
        finished = [c for c in before_last if stops(*c[:2])][:width]
        if rules.is_last:
            finished = sorted(finished + going_on[:going], key=every.index)
    else:
        if strategy.eos_score_factor is not None:
            eos, factor = strategy.eos_score_factor
            others = [(score, 0, at, c) for at, c in enumerate(going_on) if c[1] != eos for score in c[2:]]
            own = [(factor * c[2], 1, c[0], c) for c in going_on if c[1] == eos and is_rows_best(*c[:2])]
            going_on = [c for *_, c in sorted(others + own, key=lambda one: (-one[0], *one[1:3]))]
        finished = [c for c in every if stops(*c[:2]) and is_rows_best(*c[:2])]
        if case.completing is None and num_rows * len(rules.stops.ending_token_ids) > width:
            finished = finished[:width]
        else:
            finished.sort(key=lambda c: c[:2])
        finished += going_on[:going] if rules.is_last else []

    slots: list = [None] * width
    later = []
    for beam in going_on[:going]:
        if slots[beam[0]] is None:
            slots[beam[0]] = beam
        else:
            later.append(beam)
    for slot in range(width):
        if slots[slot] is None:
            slots[slot] = later.pop(0) if later else (min(slot, num_rows - 1), None, DEAD)
    return Decision(slots, finished)


def listed(step: SearchStepResult | SearchCandidates) -> list[Continuation]:
    return [*zip(*(field.tolist() for field in step[:3]), strict=True)]


def check(case: Case) -> None:
    """Raise AssertionError unless the step decides that, whether it looks at tensors or not."""
    completing = case.completing

    def judge(parents: np.ndarray, tokens: np.ndarray, _: np.ndarray | None) -> np.ndarray:
        pairs = zip(parents.ravel().tolist(), tokens.ravel().tolist(), strict=True)
        return np.array([pair in completing for pair in pairs], dtype=bool).reshape(tokens.shape)

    for allowed in (True, False):
        with shortcuts(allowed):
            are_judged = completing is not None and not case.rules.stops.are_barred
            inputs = SearchInputs(completes=StopStringConstraint(judge, torch.zeros(0)) if are_judged else None)
            steps = steps_of(case.rules, case.logits, case.scores, inputs=inputs)
        for group, step in enumerate(steps):
            expected = decide(case, group)
            beams = [(p, token if score > DEAD else None, score) for p, token, score in listed(step)]
            assert beams == expected.slots
            assert step.num_beams == sum(token is not None for _, token, _ in expected.slots)
            if completing is None or case.rules.strategy.semantics != "vllm":
                assert listed(step.finished) == expected.finished
            else:  # in the order of each row's best
                assert Counter(listed(step.finished)) == Counter(expected.finished)
            destinations = {slot for slot, parent in enumerate(step.parents.tolist()) if slot != parent}
            assert len(step.parents) == 1 or case.logits.shape[1] == 1 or not destinations & set(step.parents.tolist())
            check_logprobs(case, group, step)


def check_logprobs(case: Case, group: int, step: SearchStepResult) -> None:
    rules = case.rules
    if rules.num_logprobs is None:
        assert {*step[4:]} == {None}
        return
    logprobs = search_log_probabilities(case.logits[group], rules.stops.barred_token_ids).tolist()
    assert step.top_logprobs is not None
    for row, tokens, best in zip(logprobs, *(field.tolist() for field in step.top_logprobs), strict=True):
        assert best == sorted(row, reverse=True)[: rules.num_logprobs]
        assert len(set(tokens)) == len(tokens)
        assert [row[token] for token in tokens] == best
    for continuations, own in ((step, step.beam_logprobs), (step.finished, step.finished_logprobs)):
        assert own is not None
        for (parent, token, score), value, place in zip(
            listed(continuations), own.logprobs.tolist(), own.ranks.tolist(), strict=True
        ):
            if score > DEAD:
                assert value == logprobs[parent][token]
                assert place == sum(other >= value for other in logprobs[parent])


def logits_of(draw: st.DrawFn, width: int, may_tie: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Few levels, so that many continuations tie; some are impossible, some rows are dead."""
    num_groups, num_rows = draw(st.integers(1, 3)), draw(st.sampled_from([1, width]))
    vocab_size = draw(st.integers(1, 14))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 32)))
    levels = draw(st.sampled_from([1, 2, 4, 1000]))
    logits = torch.randint(levels, (num_groups, num_rows, vocab_size), generator=random) * (6 / levels)
    if not may_tie:
        logits = torch.randn(logits.shape, generator=random)
    if draw(st.booleans()):
        logits[torch.rand(logits.shape, generator=random) < 0.3] = DEAD
        logits[..., 0] = 1.0
    scores = -torch.randint(draw(st.sampled_from([1, 3])), (num_groups, num_rows), generator=random) / 2
    if draw(st.booleans()):
        scores[torch.rand(scores.shape, generator=random) < 0.4] = DEAD
    return logits, scores + 0.0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    width = draw(st.integers(1, 7))
    semantics, has_strings = draw(st.sampled_from(["hf", "vllm", "tridecode"])), draw(st.booleans())
    logits, scores = logits_of(draw, width, may_tie=not (semantics == "vllm" and has_strings))
    tokens = st.integers(0, logits.shape[-1] - 1)
    stops = tuple(sorted(draw(st.sets(tokens, max_size=draw(st.sampled_from([3, 14]))))))
    factor = completing = None
    if semantics == "vllm" and not has_strings and draw(st.booleans()):
        eos = draw(tokens)
        factor = (eos, draw(st.sampled_from([0.5, 1.5]))) if eos not in stops else None
    if has_strings:
        completing = frozenset(draw(st.lists(st.tuples(st.integers(0, width - 1), tokens), max_size=20)))
    rules = rules_of(
        width,
        semantics,
        stops,
        num_logprobs=draw(st.sampled_from([None, 0, 1, 5, 20])),
        are_barred=draw(st.booleans()),
        is_last=draw(st.booleans()),
        num_beams=draw(st.sampled_from([None, None, 1, max(width - 1, 1)])),
        strategy=BestStrategy(semantics, factor),
    )
    strings = ("any",) if has_strings else ()
    return Case(rules._replace(stops=rules.stops._replace(strings=strings)), logits, scores, completing)


@settings(max_examples=70, derandomize=True)
@given(cases())
def test_step_decides_what_its_rules_say(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("semantics", ["hf", "vllm", "tridecode"])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("factor", [None, (2, 0.5)])
def test_more_beams_than_tokens(semantics: str, is_last: bool, factor: tuple[int, float] | None) -> None:
    strategy = BestStrategy(semantics, factor if semantics == "vllm" else None)
    rules = rules_of(7, semantics, (0,), is_last=is_last, strategy=strategy)
    check(Case(rules, torch.randn(2, 1, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(2, 1), None))


@pytest.mark.parametrize("stops", [(5, 17), tuple(range(5, 300))], ids=["two stops", "many"])
@pytest.mark.parametrize("semantics", ["hf", "vllm", "tridecode"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_step_from_coarse_logits_of_a_large_vocabulary(
    dtype: torch.dtype, semantics: str, stops: tuple[int, ...]
) -> None:
    random = torch.Generator().manual_seed(7)
    logits = (4 * torch.randn(2, 6, 900, generator=random)).to(dtype)
    check(Case(rules_of(6, semantics, stops, num_logprobs=3), logits, -3 * torch.rand(2, 6, generator=random), None))


def test_wide_groups_decide_what_narrow_ones_do() -> None:
    random = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(1, 70, 150, generator=random)).bfloat16()
    for spread in (0.0, 50.0):  # many rows have beams, or few have all
        check(Case(rules_of(70, "hf", (1,)), logits, -spread * torch.rand(1, 70, generator=random), None))


def test_groups_do_not_see_each_other() -> None:
    random = torch.Generator().manual_seed(0)
    logits, scores = torch.randn(4, 3, 50, generator=random).bfloat16(), -torch.rand(4, 3, generator=random)
    for semantics in ("hf", "vllm", "tridecode"):
        rules = rules_of(3, semantics, (1, 2), num_logprobs=2)
        together = steps_of(rules, logits, scores)
        for group in range(4):
            (alone,) = steps_of(rules, logits[group, None], scores[group, None])
            assert repr(alone) == repr(together[group])


def test_row_that_may_take_no_token_has_no_child() -> None:
    logits = torch.zeros(1, 2, 8)
    logits[0, 0] = DEAD
    (step,) = steps_of(rules_of(2, is_controlled=True), logits, torch.tensor([[0.0, -5.0]]))
    assert step.parents.tolist() == [1, 1]
    assert step.num_beams == 2


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(1, 2, 9)
    before = logits.clone()
    take_search_step(
        rules_of(2, stops=(1,), are_barred=True, is_controlled=True), logits, SearchBeams(torch.zeros(1, 2))
    )
    assert torch.equal(logits, before)


def sampled_step(
    cells: Collection[int], stops: tuple[int, ...], is_last: bool = False
) -> tuple[SearchStepResult, list[int]]:
    logprobs = torch.zeros(4, 10).log_softmax(-1)
    rules = rules_of(4, stops=stops, is_last=is_last)
    chosen = torch.tensor(list(cells), dtype=torch.int64)
    (step, _), slots = take_strategy_cells(rules, logprobs, -torch.arange(4.0), chosen, SearchInputs())
    assert pack_search_step(step, rules.layout(*logprobs.shape)).words.shape[0] == 1
    return step, slots.tolist()


def test_what_is_sampled_stays_in_its_parents_slot_or_takes_a_dead_one() -> None:
    step, slots = sampled_step([25, 23, 31, 2], stops=())
    assert slots == [2, 1, 3, 0]
    assert step.parents.tolist() == [[0, 2, 2, 3]]
    assert step.tokens.tolist() == [[2, 3, 5, 1]]
    assert (step.finished.scores == DEAD).all()


def test_what_is_sampled_and_stops_has_no_slot() -> None:
    step, slots = sampled_step([25, 23, 31], stops=(5,))
    assert slots == [-1, 2, 3]
    assert (step.scores > DEAD).tolist() == [[False, False, True, True]]
    assert step.parents.tolist() == [[0, 1, 2, 3]], "a slot without a beam continues itself"
    assert step.finished.tokens[step.finished.scores > DEAD].tolist() == [5]
    last, _ = sampled_step([25, 23, 31], stops=(5,), is_last=True)
    assert last.finished.tokens[last.finished.scores > DEAD].tolist() == [5, 3, 1]


def test_nothing_sampled_is_a_step_without_beams() -> None:
    step, slots = sampled_step([], stops=())
    assert slots == []
    assert (step.scores == DEAD).all()
    assert (step.finished.scores == DEAD).all()
