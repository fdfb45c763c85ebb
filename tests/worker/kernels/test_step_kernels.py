"""A step by kernels is the step that torch takes: on a GPU, or interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.items import along_of, first_states_of, random_items
from tests.support.steps import rules_of
from vllm_trie.search import step as search_step
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.catalog import ConstraintAlongItems, ItemConstraint
from vllm_trie.search.constraints.constraint import Constraint
from vllm_trie.search.devices import NEVER
from vllm_trie.search.filters import SearchFilters
from vllm_trie.search.rank import SearchCandidates
from vllm_trie.search.rules import SearchRules, SearchStrategy
from vllm_trie.search.step import take_search_step
from vllm_trie.search.step_result import (
    PackedSearchStep,
    SearchStepResult,
    SearchTokenLogprobs,
    pack_search_step,
    unpack_search_steps,
)
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.search.strategies.in_groups import DiverseGroupsStrategy
from vllm_trie.search.token_tables import search_token_columns
from vllm_trie.worker.kernels import KernelStepSizes, decide, items, step, tiles, wide_keys
from vllm_trie.worker.kernels.tiles import KernelLogits
from vllm_trie.worker.select.by_kernels import select_by_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Problem:
    """Logits of some groups among others, and what their rows carry."""

    def __init__(self, rules: SearchRules, num_groups: int, num_rows: int, vocab_size: int, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.rules, self.shape = rules, (num_groups, num_rows, vocab_size)
        count = num_groups * num_rows
        values = (torch.randn(count + 2, vocab_size, generator=self.random) * 3).to(DEVICE)
        order = torch.randperm(count + 2, generator=self.random).to(DEVICE)
        self.logits = KernelLogits.of(values, order[:count], rules.stops)
        self.scores = -torch.rand(num_groups, num_rows, generator=self.random).to(DEVICE)
        self.places = torch.randperm(count, generator=self.random).to(DEVICE)
        self.states: dict[Constraint, torch.Tensor] = {}

    @property
    def beams(self) -> SearchBeams:
        return SearchBeams(self.scores, states=self.states)

    def of_rows(self) -> torch.Tensor:
        return self.logits.values[self.logits.which].view(self.shape)

    def by_kernels(self) -> tuple[PackedSearchStep, torch.Tensor]:
        sampled = torch.full((len(self.places), 2), -1, dtype=torch.int64, device=DEVICE)
        take = select_by_kernels(self.rules, KernelStepSizes.of(self.beams, self.shape[2]))
        assert take is not None
        return take(self.logits, self.beams, self.places, sampled), sampled

    def by_torch(self) -> SearchStepResult:
        return take_search_step(self.rules, self.of_rows(), self.beams)

    def by_torch_of_the_same_sums(self) -> SearchStepResult:
        """As torch takes it, from log-probabilities that are normalised as the kernels have summed."""
        logits = self.logits._replace(temperature=self.rules.filters.temperature)
        rank_rows = tiles.KernelRowRanking(tiles.RowRankingTask(1, 1), self.shape[2])
        ranked = rank_rows(tiles.launch_tile_maxima(logits), self.scores)
        highest, rest = ranked.of_rows.view(*self.shape[:2], 2, 1).unbind(2)

        def normalised(logits: torch.Tensor, barred: tuple[int, ...], temperature: float) -> torch.Tensor:
            # By a number torch divides on a GPU as it multiplies by what 1 is divided by it.
            logprobs = (logits.float() / torch.tensor(temperature, device=logits.device) - highest) - rest
            logprobs.index_fill_(-1, search_token_columns(barred, logprobs.shape[-1], logits.device), NEVER)
            return logprobs.nan_to_num(NEVER, NEVER, NEVER)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(search_step, "search_log_probabilities", normalised)
            return self.by_torch()


def check(problem: Problem) -> None:
    """Raise AssertionError unless kernels decide what torch decides: to the bit from equal sums, else by its sums."""
    taken, sampled = problem.by_kernels()
    layout = problem.rules.layout(*problem.shape[1:])
    expected = pack_search_step(same := problem.by_torch_of_the_same_sums(), layout).words
    assert taken.layout == layout
    for own, theirs in zip(
        unpack_search_steps(taken.words.cpu().numpy(), taken.layout),
        unpack_search_steps(expected.cpu().numpy(), layout),
        strict=True,
    ):
        theirs, lives = finishing_in_order(theirs, problem.rules), theirs.scores > NEVER
        assert own.scores.tolist() == theirs.scores.tolist()
        assert own.parents.tolist() == theirs.parents.tolist()
        assert own.tokens[lives].tolist() == theirs.tokens[lives].tolist()
        assert [field.tolist() for field in own.finished] == [field.tolist() for field in theirs.finished]
        assert (own.finished_ranks is None) == (problem.rules.num_ending is None)
        assert np.array_equal(own.finished_ranks, theirs.finished_ranks)
        check_reports(own, theirs, lives)
    for own, theirs in zip(taken.going[:2], same[:2], strict=True):
        assert own.dtype == theirs.dtype
    assert taken.going.beams.scores.dtype == same.scores.dtype
    for key in problem.states:
        lives = same.scores > NEVER
        assert torch.equal(taken.going.beams.states[key][lives], same.states[key][lives])
    places = problem.places.view(problem.shape[:2])
    assert torch.equal(sampled[places, 0], taken.going.tokens[:, : problem.shape[1]])
    assert (sampled[:, 1] == -1).all()
    torch.testing.assert_close(taken.going.beams.scores, problem.by_torch().scores, rtol=2e-6, atol=2e-6)


def finishing_in_order(step: SearchStepResult, rules: SearchRules) -> SearchStepResult:
    """By vLLM's rules torch may list what stops row after row; kernels list the best first, and what else ends then."""
    if rules.strategy != BestStrategy("vllm"):
        return step
    (_, tokens, scores), reports = step.finished, step.finished_logprobs
    order = np.lexsort((-scores, ~np.isin(tokens, rules.stops.ending_token_ids)))
    finished = SearchCandidates(*(field[order] for field in step.finished))
    return step._replace(
        finished=finished, finished_logprobs=reports and SearchTokenLogprobs(*(f[order] for f in reports))
    )


def check_reports(own: SearchStepResult, theirs: SearchStepResult, lives: torch.Tensor) -> None:
    if theirs.top_logprobs is None:
        return
    for row in set(theirs.parents[lives].tolist()) | set(theirs.finished.parents.tolist()):
        assert own.top_logprobs.logprobs[row].tolist() == theirs.top_logprobs.logprobs[row].tolist()
    for of_own, of_theirs in zip(own.beam_logprobs, theirs.beam_logprobs, strict=True):
        assert of_own[lives].tolist() == of_theirs[lives].tolist()
    for of_own, of_theirs in zip(own.finished_logprobs, theirs.finished_logprobs, strict=True):
        assert of_own.tolist() == of_theirs.tolist()


FILTERS = SearchFilters(), SearchFilters(0.7), SearchFilters(1.3, 0.1)
STOPS = (), (1,), (0, 2), tuple(range(1, 5000, 2))


@st.composite
def rules_of_best(draw: st.DrawFn, most_beams: int = 4) -> SearchRules:
    return rules_of(
        draw(st.integers(1, most_beams)),
        draw(st.sampled_from(["hf", "tridecode", "vllm"])),
        draw(st.sampled_from(STOPS)),
        draw(st.booleans()),
        is_last=draw(st.booleans()),
        is_controlled=True,
        num_beams=draw(st.sampled_from([None, 1])),
        num_logprobs=draw(st.sampled_from([None, None, 0, 2, 40])),
        filters=draw(st.sampled_from(FILTERS)),
    )


@st.composite
def rules_in_groups(draw: st.DrawFn) -> SearchRules:
    number = draw(st.integers(2, 3))
    penalty, padding = draw(st.sampled_from([0.1, 0.7, 9.0])), draw(st.sampled_from([None, 1]))
    done = draw(st.sampled_from([(), (0,), (1,)]))
    return rules_of(
        number * draw(st.integers(1, 2)),
        stops=draw(st.sampled_from(STOPS)),
        are_barred=draw(st.booleans()),
        strategy=DiverseGroupsStrategy(number, penalty, padding, done),
        is_last=draw(st.booleans()),
        is_controlled=True,
        filters=draw(st.sampled_from(FILTERS)),
    )


@st.composite
def problems(
    draw: st.DrawFn, of_rules: st.SearchStrategy[SearchRules], vocab_sizes: tuple[int, ...] = (3, 64, 65, 4097)
) -> Problem:
    rules = draw(of_rules)
    num_rows = draw(st.sampled_from([1, rules.width]))
    vocab_size = draw(st.sampled_from(vocab_sizes))
    problem = Problem(rules, draw(st.integers(1, 2)), num_rows, vocab_size, draw(st.integers(0, 1 << 31)))
    values = problem.logits.values
    if draw(st.booleans()):
        values.round_()  # ties
    if draw(st.booleans()):
        values.masked_fill_((torch.rand(values.shape, generator=problem.random) < 0.9).to(DEVICE), NEVER)
    if draw(st.booleans()):
        values[problem.logits.which[0]] = NEVER
    if draw(st.booleans()):
        problem.scores[0, draw(st.integers(0, num_rows - 1)) :] = NEVER
    if draw(st.booleans()):
        problem.scores.mul_(2).round_()
    problem.logits = problem.logits._replace(values=values.to(draw(st.sampled_from(TYPES))))
    return problem


@settings(max_examples=6, derandomize=True, phases=[Phase.generate])
@given(problems(rules_of_best()))
def test_kernels_take_the_step_of_torch(problem: Problem) -> None:
    check(problem)


@settings(max_examples=5, derandomize=True, phases=[Phase.generate])
@given(problems(rules_in_groups()))
def test_kernels_take_the_step_of_torch_in_groups_of_beams(problem: Problem) -> None:
    check(problem)


def is_wide(rules: SearchRules) -> bool:
    """Whether kernels for many beams take steps by these rules."""
    with only_wide():
        return step.can_take_by_kernels(rules, KernelStepSizes(1, 3))


@contextmanager
def only_wide() -> Iterator[None]:
    """Within it, kernels for many beams take steps of few, a few slots and continuations at a time."""
    lowered: list[tuple[ModuleType, str, int]] = [
        *((module, "KEYS_AT_A_TIME", 128) for module in (wide_keys, items)),
        (decide, "PART", 4),
        (decide, "SLOTS_AT_A_TIME", 2),
        (decide, "CHILDREN_AT_A_TIME", 4),
        (items, "CHILDREN_AT_A_TIME", tiles.TILE),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in lowered:
            patch.setattr(module, name, value)
        patch.setattr(step, "beams_are_few_for_kernels", lambda *_: False)
        yield


@settings(max_examples=5, derandomize=True, phases=[Phase.generate])
@given(problems(rules_of_best(most_beams=7).filter(is_wide), vocab_sizes=(3, 65, 4097, 12_300)))
def test_kernels_take_the_step_of_torch_with_many_beams(problem: Problem) -> None:
    with only_wide():
        check(problem)


def ending_with(stops: tuple[int, ...], has_ties: bool) -> Problem:
    """By vLLM's rules: of four rows two have a stop token among their best, one has many of them, one has none."""
    filters, vocab_size = SearchFilters(min_p=1e-4), 4200
    problem = Problem(rules_of(4, "vllm", stops, filters=filters), 1, 4, vocab_size, seed=len(stops))
    values, which, known = problem.logits.values, problem.logits.which, [stop for stop in stops if stop < vocab_size]
    values[which[:2], known[-1]] = values.amax() - torch.tensor([2.0, 1.0], device=DEVICE)
    values[which[2], known] += 3.0
    values[which[3], known] -= 9.0
    if has_ties:
        values.round_()
        problem.scores.round_()
    assert (problem.by_torch().finished.scores > NEVER).any()
    return problem


@pytest.mark.parametrize("stops", [(1,), (0, 70, 4096), tuple(range(1, 5000, 2))], ids=["one", "few", "many"])
@pytest.mark.parametrize("has_ties", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_by_vllms_rules_what_ends_finishes_only_among_the_best_of_its_row(
    stops: tuple[int, ...], has_ties: bool
) -> None:
    check(problem := ending_with(stops, has_ties))
    if len(stops) <= step.MOST_ENDS:
        with only_wide():
            check(problem)


@pytest.mark.parametrize(
    "strategy",
    [BestStrategy("hf"), BestStrategy("tridecode"), DiverseGroupsStrategy(2, 0.7, 1)],
    ids=["hf", "tridecode", "groups"],
)
@pytest.mark.parametrize("is_last", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_however_many_tokens_end_kernels_take_the_step_of_torch(strategy: SearchStrategy, is_last: bool) -> None:
    stops, (vocab_size, num_beams) = tuple(range(1, 200, 2)), (130, 2) if is_last else (65, None)
    rules = rules_of(4, stops=stops, strategy=strategy, is_last=is_last, num_beams=num_beams)
    problem = Problem(rules, 2, 4, vocab_size, seed=vocab_size)
    problem.logits.values[:, [stop for stop in stops if stop < vocab_size]] += 1.0
    problem.logits.values.round_()
    check(problem)
    if isinstance(strategy, BestStrategy):
        with only_wide():
            check(problem)


def test_of_many_beams_equal_ones_rank_by_place() -> None:
    """Also where more blocks, tiles and tokens are equally good than are chosen."""
    problem = Problem(rules_of(3), 1, 3, 12_300, seed=0)
    problem.logits.values.zero_()
    problem.scores.zero_()
    with only_wide():
        check(problem)
        taken, _ = problem.by_kernels()
    assert (taken.going.parents.tolist(), taken.going.tokens.tolist()) == ([[0, 0, 0]], [[0, 1, 2]])


def test_of_many_beams_what_filters_drop_of_a_row_displaces_nothing_of_another() -> None:
    """One row has a better score, and one token that is far better than what fills its blocks and tiles."""
    problem = Problem(rules_of(2, filters=SearchFilters(min_p=0.5)), 1, 2, 12_300, seed=0)
    problem.scores.copy_(torch.tensor([[0.0, -500.0]]))
    problem.logits.values[problem.logits.which[0], 5000] = 40.0
    with only_wide():
        check(problem)
        taken, _ = problem.by_kernels()
    assert taken.going.parents.tolist() == [[0, 1]]
    assert (taken.going.beams.scores > NEVER).all()


ITEMS = random_items(60, (1, 2, 3, 4), tokens=(2, 12))  # some are the beginning of others


@pytest.mark.parametrize("at_root", [True, False])
@pytest.mark.parametrize(("has_ties", "excludes"), [(True, False), (False, True)])
@pytest.mark.parametrize(
    ("are_barred", "bars_items", "num_beams"),
    [(False, False, None), (False, False, 2), (True, True, None), (True, False, None)],
)
def test_kernels_take_the_step_of_torch_along_a_catalog(
    at_root: bool, has_ties: bool, excludes: bool, are_barred: bool, bars_items: bool, num_beams: int | None
) -> None:
    num_groups, width, item_rules = 2, 3, ItemConstraint("items", excludes=excludes)
    along = along_of(ITEMS, item_rules, device=DEVICE, excluded=ITEMS[::2])
    of_phase = {"bars_items": bars_items, "num_beams": num_beams}
    rules = rules_of(width, "hf", (4,), are_barred, constraints=(along.rules,), **of_phase)
    problem = Problem(rules, num_groups, width, 70, seed=int(has_ties))
    states = torch.randint(along.trie.num_nodes, (num_groups, width), generator=problem.random).to(DEVICE)
    if has_ties:
        problem.logits.values.round_()
        problem.scores.round_()
    if at_root:
        states.zero_()
        problem.scores[1, 1:] = NEVER
    beams = SearchBeams(problem.scores, states={along: first_states_of(along, states)})
    sizes = KernelStepSizes.of(beams, 70)
    assert step.can_take_by_kernels(rules, sizes)
    sampled = torch.zeros(num_groups * width, 1, dtype=torch.int64, device=DEVICE)
    taken = step.KernelStep(rules, sizes)(problem.logits, beams, problem.places, sampled)
    theirs, layout = take_search_step(rules, problem.of_rows(), beams), rules.layout(*problem.shape[1:])
    expected = pack_search_step(theirs, layout).words
    assert taken.layout == layout
    lives = theirs.scores > NEVER
    assert torch.equal(taken.going.beams.states[along][lives], theirs.states[along][lives])
    assert torch.equal(sampled[problem.places.view(num_groups, width), 0], taken.going.tokens)
    found = unpack_search_steps(taken.words.cpu().numpy(), taken.layout)
    for own, other in zip(found, unpack_search_steps(expected.cpu().numpy(), layout), strict=True):
        assert own.parents.tolist() == other.parents.tolist()
        assert own.tokens[other.scores > NEVER].tolist() == other.tokens[other.scores > NEVER].tolist()
        assert own.scores.tolist() == pytest.approx(other.scores.tolist(), rel=2e-6)
        assert own.finished.parents.tolist() == other.finished.parents.tolist()
        assert own.finished.tokens.tolist() == other.finished.tokens.tolist()
        assert own.finished.scores.tolist() == pytest.approx(other.finished.scores.tolist(), rel=2e-6)


OF_MANY_CHILDREN = [
    *product(range(150), (3, 9)),
    *((150,), *product((5,), range(60), (1,)), *((7, own, own % 2) for own in range(70))),
    *((7, own) for own in range(70, 150)),
]
MANY_CHILDREN = along_of(OF_MANY_CHILDREN, ItemConstraint("items"), device=DEVICE)
SOME_CLOSED = along_of(
    OF_MANY_CHILDREN, ItemConstraint("items", excludes=True), device=DEVICE, excluded=OF_MANY_CHILDREN[::3]
)
NODES = 0, 1 + 5, 1 + 7, 1 + 8, 1 + 150  # the root, and nodes where all, many, some and no children go on


@st.composite
def problems_along_items(draw: st.DrawFn) -> Problem:
    along = draw(st.sampled_from([MANY_CHILDREN, SOME_CLOSED]))
    rules = rules_of(
        draw(st.integers(1, 7)),
        stops=draw(st.sampled_from([(), (4,)])),
        are_barred=draw(st.booleans()),
        bars_items=draw(st.booleans()),
        constraints=(along.rules,),
        num_beams=draw(st.sampled_from([None, 1])),
        filters=draw(st.sampled_from([SearchFilters(), SearchFilters(0.7, 0.5)])),
        num_ending=draw(st.sampled_from([None, 8, 300, 2_000])),  # the last one is more than there are
    )
    problem = draw(problems(st.just(rules), vocab_sizes=(151,)))
    num_groups, num_rows, _ = problem.shape
    nodes = torch.tensor(draw(st.lists(st.sampled_from(NODES), min_size=1, unique=True)))
    which = torch.randint(len(nodes), (num_groups, num_rows), generator=problem.random)
    problem.states = {along: first_states_of(along, nodes[which].to(DEVICE))}
    return problem


@settings(max_examples=3, derandomize=True, phases=[Phase.generate])
@given(problems_along_items())
def test_kernels_take_the_step_of_torch_with_many_beams_along_a_catalog(problem: Problem) -> None:
    with only_wide():
        check(problem)


@pytest.mark.parametrize("renormalizes", [False, True])
def test_kernels_list_what_may_finish_among_more_than_go_on(renormalizes: bool) -> None:
    """Few beams, but more than a row's best continuations: so kernels for many beams take the step."""
    along = along_of(OF_MANY_CHILDREN, ItemConstraint("items", renormalizes=renormalizes), device=DEVICE)
    rules = rules_of(4, constraints=(along.rules,), num_ending=90)
    problem = Problem(rules, 2, 4, 151, seed=3)
    problem.states = {along: torch.tensor(NODES[1:5], device=DEVICE).repeat(2, 1)}
    taken, _ = problem.by_kernels()
    layout, theirs = rules.layout(*problem.shape[1:]), problem.by_torch()
    expected = pack_search_step(theirs, layout).words
    found = unpack_search_steps(taken.words.cpu().numpy(), taken.layout)
    for own, other in zip(found, unpack_search_steps(expected.cpu().numpy(), layout), strict=True):
        assert len(own.finished_ranks) > 4
        assert own.finished_ranks.tolist() == other.finished_ranks.tolist()
        assert own.finished.tokens.tolist() == other.finished.tokens.tolist()
        assert own.finished.parents.tolist() == other.finished.parents.tolist()
        assert own.finished.scores == pytest.approx(other.finished.scores, abs=1e-5)
        assert own.scores == pytest.approx(other.scores, abs=1e-5)


@pytest.mark.parametrize("filters", [SearchFilters(), SearchFilters(0.7, 0.5)], ids=["all", "filtered"])
@pytest.mark.parametrize("node", NODES[::2])
def test_kernels_take_the_step_of_torch_with_many_beams_behind_a_node(node: int, filters: SearchFilters) -> None:
    problem = Problem(rules_of(5, constraints=(MANY_CHILDREN.rules,), filters=filters), 1, 5, 151, seed=node)
    problem.states = {MANY_CHILDREN: torch.full((1, 5), node, device=DEVICE)}
    with only_wide():
        check(problem)


SPREAD = [tuple(3 * token + 1 for token in item) for item in OF_MANY_CHILDREN]
RENORMALISED, SOME_RENORMALISED = (
    along_of(SPREAD, ItemConstraint("items", renormalizes=True, excludes=excludes), device=DEVICE, excluded=SPREAD[::3])
    for excludes in (False, True)
)


@pytest.mark.parametrize("is_wide", [False, True], ids=["few", "many"])
@pytest.mark.parametrize("is_narrow", [False, True], ids=["of all tokens", "of a level"])
@pytest.mark.parametrize(
    "filters",
    [
        pytest.param(SearchFilters(), id="all", marks=pytest.mark.nightly),
        pytest.param(SearchFilters(0.7, 0.2), id="filtered"),
    ],
)
@pytest.mark.parametrize(
    ("nodes", "along"),
    [((0,), RENORMALISED), (NODES, RENORMALISED), (NODES, SOME_RENORMALISED)],
    ids=["at the root", "anywhere", "some excluded"],
)
def test_kernels_renormalise_as_torch_does_of_all_tokens(
    is_wide: bool, is_narrow: bool, filters: SearchFilters, nodes: tuple[int, ...], along: ConstraintAlongItems
) -> None:
    """Where logits are of a level alone, too: of each third token, and of one again."""
    rules = rules_of(4, constraints=(along.rules,), filters=filters)
    problem = Problem(rules, 2, 4, 460, seed=len(nodes))
    which = torch.randint(len(nodes), (2, 4), generator=problem.random)
    problem.states = {along: first_states_of(along, torch.tensor(nodes)[which].to(DEVICE))}
    theirs = problem.by_torch()
    if is_narrow:
        level = torch.tensor([*range(1, 454, 3), 451], device=DEVICE)
        of_level = problem.logits.values[:, level].contiguous()
        problem.logits = KernelLogits.of(of_level, problem.logits.which, rules.stops)._replace(level=level)
        problem.shape = 2, 4, len(level)
    with only_wide() if is_wide else nullcontext():
        taken, sampled = problem.by_kernels()
    lives = theirs.scores > NEVER
    assert lives.any()
    assert torch.equal(taken.going.parents[lives], theirs.parents[lives])
    assert torch.equal(taken.going.tokens[lives], theirs.tokens[lives])
    assert torch.equal(sampled[problem.places, 0].view(2, 4), taken.going.tokens)
    torch.testing.assert_close(taken.going.beams.scores, theirs.scores, atol=1e-5, rtol=1e-5)
    for own, other in zip(unpack_search_steps(taken.words.cpu().numpy(), taken.layout), range(2), strict=True):
        ended = theirs.finished.scores[other] > NEVER
        assert own.finished.tokens.tolist() == theirs.finished.tokens[other][ended].tolist()
        assert own.finished.scores == pytest.approx(theirs.finished.scores[other][ended].numpy(), abs=1e-5)


def test_rows_go_on_where_each_node_has_one_child_and_take_tokens_where_beams_are_missing() -> None:
    """Two items for three beams, by kernels alone: no slot, with a beam or without, has a token that is none."""
    along = along_of([(2, 3, 4), (5, 6, 7)], ItemConstraint("items"), device=DEVICE)
    rules = rules_of(3, "hf", constraints=(along.rules,))
    root = torch.zeros(1, 3, dtype=torch.int64, device=DEVICE)
    beams = SearchBeams(torch.tensor([[0.0, NEVER, NEVER]], device=DEVICE), states={along: root})
    for length in range(3):
        problem = Problem(rules, 1, 3, 70, seed=length)
        sampled = torch.full((len(problem.places), 1), -1, dtype=torch.int64, device=DEVICE)
        beams = beams._replace(length=length)
        take = step.KernelStep(rules, KernelStepSizes.of(beams, 70))
        taken = take(problem.logits, beams, problem.places, sampled)
        theirs = take_search_step(rules, problem.of_rows(), beams)
        lives = theirs.scores > NEVER
        assert torch.equal(taken.going.parents, theirs.parents)
        assert torch.equal(taken.going.tokens[lives], theirs.tokens[lives])
        assert torch.equal(sampled[problem.places, 0], taken.going.tokens[0])
        assert (sampled[problem.places] >= 0).all()
        (own,) = unpack_search_steps(taken.words.cpu().numpy(), taken.layout)
        ended = theirs.finished.scores > NEVER
        for field, other in zip(own.finished, theirs.finished, strict=True):
            torch.testing.assert_close(torch.from_numpy(field).to(other), other[ended], atol=1e-5, rtol=0)
        beams = SearchBeams(taken.going.beams.scores, states={along: taken.going.beams.states[along]})
    assert ended.sum() == 2
