"""Forests keep to their limits, and what they are verified for is what plain beam search finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.steps import rules_of, steps_of
from vllm_trie.search.step_result import SearchStepResult
from vllm_trie.search.stopping import EndedSearchHypotheses, HfSearchPool
from vllm_trie.speculation.search.forest import (
    ROOT,
    BestTokens,
    Forest,
    Layer,
    affordable_forest_layers,
    draft_forest_layer,
    useful_forest_layers,
)

EOS, VOCABULARY = 0, 24
PROMPT = (3, 5)
NO_LIMIT = 10_000

Beam = tuple[int, ...]


class Model:
    """A toy that looks at two tokens. Its EOS comes up often."""

    def __init__(self, logits: np.ndarray) -> None:
        self.logits = logits

    @classmethod
    def random(cls, seed: int) -> Model:
        logits = 2.5 * np.random.default_rng(seed).standard_normal((VOCABULARY,) * 3)
        logits[..., EOS] += 1.0
        return cls(logits)

    def noisy(self, noise: float, seed: int) -> Model:
        return Model(self.logits + noise * np.random.default_rng(seed).standard_normal(self.logits.shape))

    def logprobs(self, beams: list[Beam]) -> torch.Tensor:
        """[beams, V] float32."""
        of_beams = np.stack([self.logits[beam[-2], beam[-1]] for beam in beams])
        return torch.from_numpy(of_beams).float().log_softmax(dim=-1)


@dataclass
class Search:
    """Beam search by the rules of transformers, one step at a time."""

    target: Model
    width: int
    max_length: int
    beams: list[Beam] = field(default_factory=lambda: [PROMPT])
    scores: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.float32))
    found: list[Beam] = field(default_factory=list)  # what has finished
    length: int = 0
    is_over: bool = False

    def __post_init__(self) -> None:
        self.pool = HfSearchPool(self.width, 1.0, self.max_length, False)

    @property
    def answer(self) -> tuple[list[tuple[Beam, float]], list[Beam], list[float]]:
        best = self.pool.best(self.width)
        finished = [(self.found[leaf], score) for score, leaf in zip(*(field.tolist() for field in best), strict=True)]
        return finished, self.beams, self.scores.tolist()

    def step(self) -> SearchStepResult:
        self.length += 1
        rules = rules_of(self.width, stops=(EOS,), is_last=self.length == self.max_length)
        logits, scores = self.target.logprobs(self.beams)[None], torch.from_numpy(self.scores)[None]
        (step,) = steps_of(rules, logits, scores)
        for parent, token, score in zip(*step.finished, strict=True):
            self.found.append((*self.beams[parent], int(token)))
            self.pool.add(
                EndedSearchHypotheses.of([float(score)], [int(token)], [len(self.found) - 1], [0]), self.length
            )
        self.beams = [
            (*self.beams[parent], int(token)) for parent, token in zip(step.parents, step.tokens, strict=True)
        ]
        self.scores = step.scores
        best = float(step.scores.max())
        self.is_over = self.length == self.max_length or self.pool.is_done(best, self.length)
        return step


Narrow = Callable[[Layer], Layer]


def best(logprobs: torch.Tensor) -> BestTokens:
    """All tokens, the best first."""
    return BestTokens(*(field.numpy() for field in logprobs.sort(descending=True)))


def drafted(
    search: Search,
    draft: Model,
    num_layers: int,
    draft_width: int,
    max_drafts: int = NO_LIMIT,
    seen: Narrow = lambda layer: layer,
) -> Forest:
    """A forest after the search's beams."""
    width = len(search.beams)
    forest = Forest([beam[-1] for beam in search.beams], max_drafts)
    texts = dict(enumerate(search.beams))
    layer = Layer(list(range(width)), search.scores, width)
    for _ in range(num_layers):
        logprobs = draft.logprobs([texts[node] for node in layer.nodes])
        logprobs[:, EOS] = float("-inf")
        layer = draft_forest_layer(forest, seen(layer), best(logprobs), width, draft_width)
        if not layer.nodes:
            break
        for node in layer.nodes:
            texts[node] = (*texts[forest.parents[node]], forest.tokens[node])
    return forest


def verify(search: Search, forest: Forest, num_layers: int) -> int:
    """Steps of the search as far as the forest has what they lead to. Returns how many."""
    nodes: list[int | None] = list(range(len(search.beams)))
    before = search.length
    while search.length <= before + num_layers and not search.is_over and None not in nodes:
        step = search.step()
        chosen = zip(step.parents.tolist(), step.tokens.tolist(), strict=True)
        nodes = [forest.child(nodes[parent], token) for parent, token in chosen]
    return search.length - before


def plain(target: Model, width: int, max_length: int) -> Search:
    search = Search(target, width, max_length)
    while not search.is_over:
        search.step()
    return search


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    width=st.sampled_from([1, 2, 4]),
    noise=st.sampled_from([0.0, 0.5, 1.5]),
    num_layers=st.integers(1, 5),
    more_drafts=st.integers(0, 12),
    max_drafts=st.integers(0, 60),
)
def test_a_search_verified_on_forests_is_plain_beam_search(
    seed: int, width: int, noise: float, num_layers: int, more_drafts: int, max_drafts: int
) -> None:
    target = Model.random(seed)
    draft, search = target.noisy(noise, seed + 1), Search(target, width, 30)
    search.step()
    while not search.is_over:
        forest = drafted(search, draft, num_layers, width + more_drafts, max_drafts)
        check(forest, max_drafts)
        verify(search, forest, num_layers)
    assert search.answer == plain(target, width, 30).answer


def steps_on_perfect_drafts(seed: int, width: int, draft_width: int, seen: Narrow) -> list[int]:
    """Of forests of four layers drafted by the target itself: the steps that each lets be taken."""
    target, counts = Model.random(seed), []
    search = Search(target, width, 41)
    search.pool.is_done = lambda *_: False
    search.step()
    while not search.is_over:
        counts.append(verify(search, drafted(search, target, 4, draft_width, seen=seen), 4))
    return counts


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_on_perfect_drafts_every_step_is_found(width: int, factor: int) -> None:
    for seed in range(4):
        assert steps_on_perfect_drafts(seed, width, factor * width, lambda layer: layer) == [5] * 8


@pytest.mark.parametrize("width", [2, 4])
def test_without_the_narrow_beam_first_perfect_drafts_miss_some(width: int) -> None:
    counts = [
        steps for seed in range(4) for steps in steps_on_perfect_drafts(seed, width, 2 * width, without_narrow_beam)
    ]
    assert 3.5 < np.mean(counts) < 4.95


def without_narrow_beam(layer: Layer) -> Layer:
    return layer._replace(num_narrow=0)


def check(forest: Forest, max_drafts: int) -> None:
    """Raise AssertionError unless each row is the tree of its root, parents first, within the limit."""
    assert forest.num_drafts == forest.num_nodes - len(forest.rows) <= max_drafts
    assert sorted(node for row in forest.rows for node in row) == [*range(forest.num_nodes)]
    for row, nodes in enumerate(forest.rows):
        assert nodes == sorted(nodes), "each node comes after its parent"
        sees = forest.attention_mask(row)
        for place, node in enumerate(nodes):
            path = forest.path(node)
            assert (path[0], path[-1], len(path)) == (nodes[0], node, forest.depths[node] + 1)
            assert [nodes[at] for at in np.flatnonzero(sees[place])] == path
            assert (forest.row_of[node], forest.places[node]) == (row, place)
            if forest.parents[node] != ROOT:
                assert forest.child(forest.parents[node], forest.tokens[node]) == node
        assert (forest.attention_mask(row, len(nodes) // 2) == sees[len(nodes) // 2 :]).all()
    assert set(forest.leaves()) == set(range(forest.num_nodes)) - set(forest.parents)


@settings(max_examples=50)
@given(
    num_roots=st.integers(1, 4),
    max_drafts=st.integers(0, 40),
    wanted=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), max_size=50),
)
def test_rows_are_the_trees_of_their_roots_within_the_limit(
    num_roots: int, max_drafts: int, wanted: list[tuple[int, int]]
) -> None:
    forest = Forest(range(num_roots), max_drafts)
    for place, token in wanted:
        parent, num_nodes = place % forest.num_nodes, forest.num_nodes
        known = forest.child(parent, token)
        if known is not None:
            assert forest.add(parent, token) == known
        elif forest.has_room:
            assert forest.add(parent, token) == forest.child(parent, token) == num_nodes
        check(forest, max_drafts)


def test_there_is_room_up_to_the_last_draft_and_those_that_are_open() -> None:
    forest = Forest([7, 8], max_drafts=3)
    forest.open(1)
    assert forest.add(0, 1) == 2
    assert not forest.has_room
    forest.open(3)
    assert (forest.add(0, 2), forest.add(2, 2)) == (3, 4)
    assert not forest.has_room
    assert forest.add(0, 1) == 2, "what is there needs no room"
    assert not Forest([7], max_drafts=0).has_room


@given(
    max_drafts=st.integers(0, 150), num_layers=st.integers(1, 5), least_width=st.integers(1, 4), more=st.integers(0, 8)
)
def test_as_many_layers_are_affordable_as_have_room_whatever_is_drafted(
    max_drafts: int, num_layers: int, least_width: int, more: int
) -> None:
    layers, drafts = affordable_forest_layers(max_drafts, num_layers, least_width + more, least_width)
    if layers == 0:
        assert (drafts, max_drafts < least_width) == (0, True)
        return
    assert least_width <= drafts <= least_width + more
    assert layers * drafts <= max_drafts
    assert drafts == least_width + more or layers * (drafts + 1) > max_drafts
    assert layers == num_layers or (layers + 1) * least_width > max_drafts


LOGPROBS = torch.tensor([[-0.5, -1.0, -9.0, -9.0], [-0.1, -3.0, -9.0, -9.0], [-0.2, -0.3, -9.0, -9.0]])
SCORES = np.array([0.0, -1.0, -5.0], np.float32)


@pytest.mark.parametrize(
    ("draft_width", "expected"),
    [
        (2, [(0, 0), (0, 1)]),  # of the beams 0 and 2: the beam of width 2 that goes on from them
        (3, [(0, 0), (0, 1), (1, 0)]),
        (5, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]),
    ],
)
def test_the_best_of_the_narrow_beam_come_first(draft_width: int, expected: list[tuple[int, int]]) -> None:
    forest = Forest([0, 0, 0], NO_LIMIT)
    layer = draft_forest_layer(
        forest, Layer([0, 2, 1], SCORES[[0, 2, 1]], 2), best(LOGPROBS[[0, 2, 1]]), 2, draft_width
    )
    assert [(forest.parents[node], forest.tokens[node]) for node in layer.nodes] == expected
    assert layer.num_narrow == 2
    assert layer.scores.tolist() == pytest.approx([(SCORES[p] + LOGPROBS[p, t]).item() for p, t in expected])


def test_the_narrow_beam_is_drafted_although_others_score_better() -> None:
    forest = Forest([0, 0, 0], NO_LIMIT)
    layer = draft_forest_layer(forest, Layer([2, 1, 0], SCORES[::-1], 1), best(LOGPROBS.flip(0)), 1, 2)
    assert [(forest.parents[node], forest.tokens[node]) for node in layer.nodes] == [(2, 0), (0, 0)]
    assert layer.num_narrow == 1


def test_what_there_is_no_room_for_is_left_out_the_worst_first() -> None:
    forest = Forest([0, 0, 0], max_drafts=2)
    layer = draft_forest_layer(forest, Layer([0, 1, 2], SCORES, 3), best(LOGPROBS), 3, 6)
    assert [(forest.parents[node], forest.tokens[node]) for node in layer.nodes] == [(0, 0), (0, 1)]
    assert layer.num_narrow == 2, "one of the narrow beam had no room"


def test_what_ends_or_is_dead_is_not_drafted() -> None:
    logprobs = LOGPROBS.clone()
    logprobs[:, 1:] = float("-inf")
    forest = Forest([0, 0, 0], NO_LIMIT)
    dead = np.array([0.0, -np.inf, -5.0], np.float32)
    layer = draft_forest_layer(forest, Layer([0, 1, 2], dead, 3), best(logprobs), 3, 9)
    assert [(forest.parents[node], forest.tokens[node]) for node in layer.nodes] == [(0, 0), (2, 0)]
    assert draft_forest_layer(forest, layer, best(torch.full((2, 4), float("-inf"))), 3, 9).nodes == []


@pytest.mark.parametrize(
    ("max_drafts", "width", "expected"), [(8, 4, 1), (16, 4, 2), (32, 4, 4), (40, 16, 1), (64, 16, 2), (128, 64, 1)]
)
def test_a_forest_with_few_drafts_has_no_layer_that_is_narrower_than_the_beams(
    max_drafts: int, width: int, expected: int
) -> None:
    assert useful_forest_layers(max_drafts, 4, 2 * width, width) == expected


@pytest.mark.parametrize("draft_width", [1, 3, 4, 5, 16])
def test_a_forest_with_all_its_drafts_has_all_its_layers(draft_width: int) -> None:
    assert all(useful_forest_layers(count * draft_width, count, draft_width, 4) == count for count in range(1, 9))
