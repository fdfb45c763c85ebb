"""Search by steps, against a plain loop, on texts that a hash makes up."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import step_reference
from tests.support.step_reference import Draw, Found, Node, Sampled, Task, beam_search
from vllm_trie.step_search.allotment import allot_steps_by_score, allot_steps_evenly, steps_worth_their_kv
from vllm_trie.step_search.hypotheses import SampledStep, StepHypothesis, derived_step_seed
from vllm_trie.step_search.open_candidates import StepTreeSearch
from vllm_trie.step_search.rules import StepRules
from vllm_trie.step_search.scores import ScorerError, checked_step_scores
from vllm_trie.step_search.search import StepSearch

DELIMITER, EOS = 0, 1


def sampled(tokens: tuple[int, ...], seed: int, most: int, stops_at_delimiter: bool) -> Sampled:
    """A step of letters, which the tokens so far and the seed decide."""
    draw, new = random.Random(repr((tokens, seed))), list[int]()
    while len(new) < most:
        new.append(draw.choice([DELIMITER, EOS, 2, 3]))
        if new[-1] == EOS:
            return Sampled(text_of(new[:-1]), (*new,), "stop")
        if new[-1] == DELIMITER and stops_at_delimiter:
            return Sampled(text_of(new), (*new,), None)
    return Sampled(text_of(new), (*new,), "length")


def text_of(tokens: list[int]) -> str:
    return "".join("|?ab"[token] for token in tokens)


def few_scores(text: str) -> float:
    """A score that many texts share, so that there are ties."""
    return float(random.Random(text).randrange(5))


class Drawer:
    """Draws, and remembers by which seeds."""

    def __init__(self) -> None:
        self.seeds = list[int]()

    def __call__(self, tokens: tuple[int, ...], seed: int, most: int, stops_at_delimiter: bool) -> Sampled:
        self.seeds.append(seed)
        return sampled(tokens, seed, most, stops_at_delimiter)


def run(rules: StepRules, draw: Draw = sampled) -> StepSearch:
    state, is_over = StepSearch(rules), False
    while not is_over:
        steps = []
        for beam, _, seed, most, stops, is_greedy in state.plan():
            text, tokens, reason = (sampled if is_greedy else draw)(beam.token_ids, seed, most, stops)
            steps.append(SampledStep(text, tokens, -1.0 * len(tokens), reason))
        if questions := state.take(steps):
            is_over = state.judge([few_scores(candidate.text + lookahead) for candidate, lookahead in questions])
    return state


def task_of(rules: StepRules) -> Task:
    asked = rules.width, rules.candidates, rules.max_tokens, rules.max_steps, rules.stops_early, rules.seed
    return Task(sampled, few_scores, *asked)


def check_equal(rules: StepRules, reference: Callable[[Task], list[Found]], **others: Any) -> None:
    """Raise AssertionError unless the reference finds the same, and by the same draws, one after the other."""
    ours, theirs = Drawer(), Drawer()
    state = run(rules, ours)
    assert found_by(state) == reference(replace(task_of(rules), draw=theirs, **others))
    assert ours.seeds == theirs.seeds


def found_by(state: StepSearch) -> list[Found]:
    return [Found(h.text, h.token_ids, h.score, h.finish_reason or "") for h in state.finished]


def rules_with(**others: Any) -> st.SearchStrategy[StepRules]:
    fields = {
        "width": st.integers(1, 4),
        "candidates": st.integers(1, 3),
        "max_tokens": st.integers(1, 12),
        "max_steps": st.none() | st.integers(1, 4),
        "stops_early": st.booleans(),
        "seed": st.integers(0, 1000),
    }
    return st.builds(StepRules, **fields | others)


RULES = rules_with()
REBASE = rules_with(allot=st.just("rebase"), allot_temperature=st.sampled_from([0.3, 1.0, 2.7, 50.0]))


@given(RULES)
def test_it_finds_what_a_plain_loop_finds(rules: StepRules) -> None:
    check_equal(rules, beam_search)


@given(REBASE)
def test_rebase_finds_what_the_papers_algorithm_finds(rules: StepRules) -> None:
    check_equal(rules, partial(step_reference.rebase, temperature=rules.allot_temperature, price=0.0))


@settings(max_examples=50)
@given(REBASE, st.floats(0.01, 3.0))
def test_ets_finds_what_all_sets_of_leaves_tried_find(rules: StepRules, price: float) -> None:
    rules = replace(rules, prefer_shared=price, width=min(rules.width, 3))
    check_equal(rules, partial(step_reference.rebase, temperature=rules.allot_temperature, price=price))


@given(rules_with(allot=st.just("dvts")))
def test_dvts_finds_what_subtrees_find_one_after_the_other(rules: StepRules) -> None:
    ours, theirs = found_by(run(rules)), step_reference.dvts(task_of(rules))
    assert {(f.text, f.score) for f in ours} == {(f.text, f.score) for f in theirs}
    assert [f.score for f in ours] == [f.score for f in theirs]


@given(rules_with(order=st.just("best"), max_steps=st.integers(1, 6)))
def test_best_first_finds_what_a_plain_loop_over_all_open_candidates_finds(rules: StepRules) -> None:
    check_equal(rules, step_reference.best_first)


@settings(max_examples=50)
@given(rules_with(order=st.just("best"), allot=st.just("rebase"), allot_temperature=st.sampled_from([0.3, 1.0, 2.7])))
def test_best_first_shares_its_budget_among_all_open_candidates(rules: StepRules) -> None:
    temperature = rules.allot_temperature
    check_equal(rules, partial(step_reference.rebase, temperature=temperature, price=0.0, returns=True))


@given(
    rules_with(order=st.just("mcts"), max_steps=st.integers(1, 6), exploration=st.sampled_from([0.0, 0.5, 1.0, 7.0]))
)
def test_tree_search_finds_what_uct_counted_anew_each_time_finds(rules: StepRules) -> None:
    check_equal(rules, partial(step_reference.mcts, exploration=rules.exploration))


def test_tree_search_spreads_the_candidates_of_a_round_and_returns_to_other_branches() -> None:
    """Worked by hand: means 0.5, 0.25, 0 after one visit each; a choice counts as 2 visits at once."""
    rules = StepRules(2, 2, max_tokens=10, max_steps=9, stops_early=False, seed=0, order="mcts", exploration=1.0)
    state = StepSearch(rules)
    state.plan()
    state.take([SampledStep(text, [2]) for text in "abcd"])
    state.judge([0.5, 0.25, 0.0, 0.0])
    assert [beam.text for beam in state.beams] == ["a", "b"]
    state.plan()
    state.take([SampledStep(text, [2]) for text in "efgh"])  # ae, bf, ag, bh
    state.judge([0.0, 0.9, 0.0, 0.9])
    assert [(beam.text, len(beam.path)) for beam in state.beams] == [("bf", 2), ("c", 1)]


@pytest.mark.parametrize("order", ["breadth", "best", "mcts"])
@pytest.mark.parametrize("lookahead", [1, 3, 100])
@settings(max_examples=20)
@given(rules=rules_with(max_steps=st.integers(1, 4)))
def test_a_lookahead_is_judged_and_is_no_part_of_what_is_found(order: Any, lookahead: int, rules: StepRules) -> None:
    def look(tokens: tuple[int, ...], most: int) -> str:
        return sampled(tokens, 0, most, False).text

    rules = replace(rules, order=order, lookahead=lookahead)
    theirs = {
        "breadth": beam_search,
        "best": step_reference.best_first,
        "mcts": partial(step_reference.mcts, exploration=1.0),
    }
    check_equal(rules, theirs[order], look=look, lookahead=lookahead)
    assert all(h.text == text_of([*h.token_ids]).replace("?", "") for h in run(rules).finished)


@pytest.mark.parametrize("order", ["best", "mcts"])
def test_what_is_sampled_at_a_place_of_the_tree_is_the_same_whenever_it_is_returned_to(order: Any) -> None:
    """The same candidate, expanded in different rounds of two searches, has the same children."""
    children = [dict[tuple[int, ...], Any](), dict[tuple[int, ...], Any]()]
    for of_search, score in zip(children, (few_scores, lambda text: -few_scores(text)), strict=True):
        state = StepSearch(StepRules(2, 3, 12, max_steps=8, stops_early=False, seed=5, order=order))
        for _ in range(7):
            planned = state.plan()
            steps = [sampled(step.beam.token_ids, step.seed, step.max_tokens, True) for step in planned]
            of_search |= {path: step for (_, path, *_), step in zip(planned, steps, strict=True)}
            questions = state.take([SampledStep(step.text, step.tokens, 0.0, step.reason) for step in steps])
            state.judge([score(question.candidate.text) for question in questions])
    one, other = children
    assert len(one.keys() & other.keys()) > 12
    assert all(one[path] == other[path] for path in one.keys() & other.keys())
    assert one.keys() != other.keys()


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9), st.integers(0, 40), st.floats(0.05, 20))
def test_shares_by_score_add_up_and_are_none_more_than_one_off(
    scores: list[float], total: int, temperature: float
) -> None:
    scores = sorted(scores, reverse=True)
    shares = allot_steps_by_score(scores, total, temperature)
    weights = [math.exp(score / temperature) for score in scores]
    assert sum(shares) == total
    assert shares == sorted(shares, reverse=True)
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - total * weight / sum(weights)) < 1 + 1e-9


def test_shares_are_rounded_by_largest_remainders_and_ties_go_to_the_better_beam() -> None:
    assert allot_steps_by_score([0.0, 0.0, 0.0], 8, 1.0) == [3, 3, 2]
    assert allot_steps_by_score([math.log(5.6), math.log(3.3), math.log(1.1)], 10, 1.0) == [6, 3, 1]
    assert allot_steps_by_score([math.log(5.5), math.log(2.6), math.log(1.9)], 10, 1.0) == [5, 3, 2]
    assert allot_steps_by_score([1e308, -1e308], 3, 1e-300) == [3, 0]
    assert allot_steps_evenly(3, 8) == [3, 3, 2]


def test_a_step_that_beams_share_is_paid_once() -> None:
    """Two beams behind one long step are worth keeping where each alone is not."""

    def beam(path: tuple[int, ...], *lengths: int) -> StepHypothesis:
        return StepHypothesis(path=path, step_lengths=lengths)

    left, right, alone = beam((0, 0), 8, 1), beam((0, 1), 8, 1), beam((1, 0), 8, 2)
    assert steps_worth_their_kv([left, right, alone], [3, 3, 3], 1.0) == [left, right]
    assert steps_worth_their_kv([left, right, alone], [3, 3, 3], 0.1) == [left, right, alone]
    assert steps_worth_their_kv([left, right, alone], [3, 3, 3], 9.0) == [left]  # something must go on


@st.composite
def trees(draw: st.DrawFn) -> list[StepHypothesis]:
    """At most eight beams in any order, some behind long runs of steps that nothing else continues."""
    paths = list[tuple[int, ...]]()
    for _ in range(draw(st.integers(1, 8))):
        shared = draw(st.sampled_from(paths))[: draw(st.integers(0, 5))] if paths else ()
        paths.append((*shared, *draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))))
    leaves = [p for p in dict.fromkeys(paths) if not any(q[: len(p)] == p for q in paths if q != p)]
    steps = {path[: i + 1]: 0 for path in leaves for i in range(len(path))}
    lengths = {step: draw(st.integers(1, 9)) for step in steps}
    spans = [tuple(lengths[path[: i + 1]] for i in range(len(path))) for path in leaves]
    return [StepHypothesis(path=path, step_lengths=span) for path, span in zip(leaves, spans, strict=True)]


@given(trees(), st.data(), st.floats(0.01, 3.0))
def test_no_set_of_beams_is_worth_more_than_the_one_that_pays_for_its_kv(
    beams: list[StepHypothesis], data: st.DataObject, price: float
) -> None:
    shares = data.draw(st.lists(st.integers(1, 5), min_size=len(beams), max_size=len(beams)))
    nodes = [Node(beam.path, ends=tuple(accumulate(beam.step_lengths))) for beam in beams]
    per_token = price / step_reference.kv_tokens(nodes)

    def worth(kept: Collection[Node]) -> float:
        of_these = [share for node, share in zip(nodes, shares, strict=True) if node in kept]
        return step_reference.worth([*kept], of_these, sum(shares), per_token)

    kept = steps_worth_their_kv(beams, shares, price)
    assert kept == [beam for beam in beams if beam in kept]
    best = step_reference.pruned(nodes, shares, price)
    assert worth([node for node, beam in zip(nodes, beams, strict=True) if beam in kept]) == pytest.approx(worth(best))


def test_of_beams_that_lose_alike_the_best_one_is_kept() -> None:
    beams = [StepHypothesis(path=path, step_lengths=(4, 4)) for path in [(2, 0), (0, 1), (0, 0), (1, 0)]]
    assert steps_worth_their_kv(beams, [1, 1, 1, 1], 99.0) == beams[:1]


def test_what_beams_cost_is_found_without_cutting_each_path_at_each_step() -> None:
    """The front end of a server does so for thousands of beams between the tokens of all its streams."""
    num_cuts, num_beams = 0, 64

    class Counted(tuple[int, ...]):
        def __getitem__(self, place: Any) -> Any:
            nonlocal num_cuts
            num_cuts += 1
            return super().__getitem__(place)

    paths = [Counted((*[0] * 20, i, *[0] * 20)) for i in range(num_beams)]
    lengths = Counted([1] * 41)
    beams = [StepHypothesis(path=path, step_lengths=lengths) for path in paths]
    assert steps_worth_their_kv(beams, [1] * num_beams, 0.01) == beams
    assert num_cuts <= 4 * num_beams


@given(RULES)
def test_what_is_returned_is_as_it_was_sampled(rules: StepRules) -> None:
    state = run(rules)
    assert 1 <= len(state.finished) <= rules.width
    assert len({hypothesis.text for hypothesis in state.finished}) == len(state.finished)
    for hypothesis in state.finished:
        assert len(hypothesis.token_ids) <= rules.max_tokens
        assert len(hypothesis.scores) == len(hypothesis.steps) <= state.num_rounds
        assert hypothesis.scores == tuple(
            few_scores("".join(hypothesis.steps[: i + 1])) for i in range(len(hypothesis.steps))
        )
        assert hypothesis.sum_logprobs == -len(hypothesis.token_ids)
    assert state.num_sampled == state.num_rounds * rules.width * rules.candidates
    if rules.max_steps is not None:
        assert state.num_rounds <= rules.max_steps


def test_a_search_that_ends_early_has_the_best_that_were_scored() -> None:
    search = StepSearch(StepRules(width=2, candidates=2, max_tokens=10, max_steps=None, stops_early=False, seed=0))
    assert search.best_so_far(3) == []
    search.plan()
    texts = [("a", None), ("bb", None), ("c", "stop"), ("bb", None)]
    search.take([SampledStep(text, [2], finish_reason=reason) for text, reason in texts])
    assert search.best_so_far(3) == [], "none is scored"
    search.judge([1.0, 3.0, 2.0])
    assert [(found.text, found.finish_reason) for found in search.best_so_far(3)] == [
        ("bb", None), ("c", "stop"), ("a", None)
    ]  # fmt: skip


def test_a_round_is_dealt_out_evenly_over_its_beams_best_first() -> None:
    state = StepSearch(StepRules(width=2, candidates=3, max_tokens=10, max_steps=None, stops_early=False, seed=0))
    assert [draw.beam for draw in state.plan()] == [StepHypothesis()] * 6
    state.take([SampledStep(text, [2]) for text in "abcdef"])
    state.judge([0, 5, 1, 7, 2, 3])
    assert [draw.beam.text for draw in state.plan()] == ["d", "b"] * 3
    assert len({draw.seed for draw in state.plan()}) == 6


def test_equal_texts_are_one_candidate_but_for_one_that_has_ended() -> None:
    state = StepSearch(StepRules(width=3, candidates=2, max_tokens=10, max_steps=None, stops_early=False, seed=0))
    state.plan()
    sampled_steps = [
        SampledStep("a", [2]),
        SampledStep("b", [3]),
        SampledStep("a", [9, 9]),
        SampledStep("a", [2, 1], 0.0, "stop"),
    ]
    asked = state.take([*sampled_steps, sampled_steps[1], sampled_steps[3]])
    assert [(c.text, c.token_ids, c.is_finished) for c, _ in asked] == [
        ("a", (2,), False),
        ("b", (3,), False),
        ("a", (2, 1), True),
    ]
    state.judge([1, 2, 3])
    assert [beam.text for beam in state.beams] == ["b", "a"]  # there are no three
    assert len(state.plan()) == 6


def test_ties_go_to_the_earlier_candidate() -> None:
    state = StepSearch(StepRules(width=2, candidates=2, max_tokens=10, max_steps=None, stops_early=False, seed=0))
    state.plan()
    state.take([SampledStep(text, [2]) for text in "dcba"])
    state.judge([1, 1, 1, 1])
    assert [beam.text for beam in state.beams] == ["d", "c"]


def test_the_last_step_goes_on_to_the_end() -> None:
    state = StepSearch(StepRules(width=1, candidates=1, max_tokens=10, max_steps=2, stops_early=False, seed=0))
    assert [draw.stops_at_delimiter for draw in state.plan()] == [True]
    state.take([SampledStep("a|", [2, 0])])
    state.judge([1.0])
    assert [(draw.stops_at_delimiter, draw.max_tokens) for draw in state.plan()] == [(False, 8)]


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        ([1.0], "returned 1 numbers for 2 candidates; return one for each"),
        ([1.0, math.nan], "returned nan for candidate 1 of 2; return finite numbers"),
        ([math.inf, 1.0], "returned inf for candidate 0 of 2; return finite numbers"),
        ([1.0, -math.inf], "returned -inf for candidate 1 of 2; return finite numbers"),
        ([1.0, None], "returned what is not a number"),
        (None, "returned what is not a number"),
        (["high", 1], "returned what is not a number"),
    ],
)
def test_what_are_no_scores_is_refused(scores: Any, why: str) -> None:
    with pytest.raises(ScorerError, match=why):
        checked_step_scores(scores, 2)


def test_scores_may_be_any_finite_numbers() -> None:
    torch = pytest.importorskip("torch")
    assert checked_step_scores(torch.tensor([1.5, -3e38]), 2) == [1.5, torch.tensor(-3e38).item()]


def test_seeds_are_the_same_everywhere_and_fit_where_vllm_puts_them() -> None:
    assert derived_step_seed(1, (2, 3, 4)) == 3197974782137503471
    assert all(0 <= derived_step_seed(seed, ()) < 2**63 for seed in range(100))


def test_a_tree_search_selects_among_thousands_of_open_candidates_without_looking_at_each() -> None:
    """The front end of a server does so between the tokens of all its streams."""
    looked_at = 0

    class Counted(dict[Any, float]):
        def __getitem__(self, path: Any) -> float:
            nonlocal looked_at
            looked_at += 1
            return super().__getitem__(path)

    width, tree = 16, StepTreeSearch(candidates_each=64)
    tree._sums = Counted()
    parents = [(root,) for root in range(32)]
    tree.add([StepHypothesis(path=path, scores=(0.5,), finish_reason="stop") for path in parents])
    tree.add([StepHypothesis(path=(*path, i), scores=(i / 64,)) for path in parents for i in range(64)])
    chosen = tree.first(width)
    assert len({c.path for c in chosen}) == width
    assert looked_at <= width * (len(parents) + 64)
    assert len(tree.candidates) == len(parents) * 64
