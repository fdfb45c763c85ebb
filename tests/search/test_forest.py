"""Forests keep to their limits, and what they are verified for is what plain beam search finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.steps import rules_of, steps_of
from vllm_trie.search.forest import ROOT, Forest, Layer, RowFork, affordable, grow, least_affordable
from vllm_trie.search.step_result import Step
from vllm_trie.search.stopping import HfPool

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
        self.pool = HfPool(self.width, 1.0, self.max_length, False)

    @property
    def answer(self) -> tuple[list[tuple[Beam, float]], list[Beam], list[float]]:
        finished = [(self.found[one.node], one.score) for one in self.pool.best(self.width)]
        return finished, self.beams, self.scores.tolist()

    def step(self) -> Step:
        self.length += 1
        rules = rules_of(self.width, stops=(EOS,), is_last=self.length == self.max_length)
        logits, scores = self.target.logprobs(self.beams)[None], torch.from_numpy(self.scores)[None]
        (step,) = steps_of(rules, logits, scores)
        for parent, token, score in zip(*step.finished, strict=True):
            self.found.append((*self.beams[parent], int(token)))
            self.pool.add([float(score)], self.length, [int(token)], [len(self.found) - 1])
        self.beams = [
            (*self.beams[parent], int(token)) for parent, token in zip(step.parents, step.tokens, strict=True)
        ]
        self.scores = step.scores
        best = float(step.scores.max())
        self.is_over = self.length == self.max_length or self.pool.is_done(best, self.length)
        return step


Narrow = Callable[[Layer], Layer]


def drafted(
    search: Search,
    draft: Model,
    num_layers: int,
    draft_width: int,
    max_rows: int = NO_LIMIT,
    max_tokens: int = NO_LIMIT,
    seen: Narrow = lambda layer: layer,
) -> Forest:
    """A forest after the search's beams."""
    width = len(search.beams)
    forest = Forest([beam[-1] for beam in search.beams], max_rows, max_tokens)
    texts = dict(enumerate(search.beams))
    layer = Layer(list(range(width)), torch.from_numpy(search.scores), range(width))
    for _ in range(num_layers):
        logprobs = draft.logprobs([texts[node] for node in layer.nodes])
        logprobs[:, EOS] = float("-inf")
        layer, _ = grow(forest, seen(layer), logprobs, width, draft_width)
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


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    width=st.sampled_from([1, 2, 4]),
    noise=st.sampled_from([0.0, 0.5, 1.5]),
    num_layers=st.integers(1, 5),
    more_drafts=st.integers(0, 12),
    more_rows=st.integers(0, 30),
    more_tokens=st.integers(0, 120),
)
def test_a_search_verified_on_forests_is_plain_beam_search(
    seed: int, width: int, noise: float, num_layers: int, more_drafts: int, more_rows: int, more_tokens: int
) -> None:
    target = Model.random(seed)
    draft, search = target.noisy(noise, seed + 1), Search(target, width, 30)
    search.step()
    while not search.is_over:
        max_rows, max_tokens = width + more_rows, width + more_tokens
        forest = drafted(search, draft, num_layers, width + more_drafts, max_rows, max_tokens)
        check(forest, max_rows, max_tokens)
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
    return layer._replace(narrow=())


def check(forest: Forest, max_rows: int, max_tokens: int) -> None:
    """Raise AssertionError unless rows are exactly the paths from roots to leaves, within the limits."""
    assert len(forest.rows) <= max_rows
    assert forest.num_row_tokens == sum(map(len, forest.rows)) <= max_tokens
    leaves = set(range(forest.num_nodes)) - set(forest.parents)
    assert sorted(row[-1] for row in forest.rows) == sorted(leaves)
    for row in forest.rows:
        assert forest.parents[row[0]] == ROOT
        assert all(forest.parents[child] == parent for parent, child in pairwise(row))
    for node in range(forest.num_nodes):
        assert forest.row_of[node] == next(at for at, row in enumerate(forest.rows) if node in row)
        assert forest.path(node)[-1] == node
        if forest.parents[node] != ROOT:
            assert forest.child(forest.parents[node], forest.tokens[node]) == node


@settings(max_examples=100, deadline=None)
@given(
    num_roots=st.integers(1, 4),
    more_rows=st.integers(0, 6),
    more_tokens=st.integers(0, 40),
    wanted=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), max_size=40),
)
def test_rows_are_the_paths_to_the_leaves_within_the_limits(
    num_roots: int, more_rows: int, more_tokens: int, wanted: list[tuple[int, int]]
) -> None:
    max_rows, max_tokens = num_roots + more_rows, num_roots + more_tokens
    forest = Forest(range(num_roots), max_rows, max_tokens)
    for place, token in wanted:
        parent, rows = place % forest.num_nodes, [row[:] for row in forest.rows]
        known = forest.child(parent, token)
        if known is not None:
            assert forest.add(parent, token) == (known, None)
            continue
        if not forest.has_room(parent):
            continue
        node, fork = forest.add(parent, token)
        assert forest.child(parent, token) == node
        is_first = any(row[-1] == parent for row in rows)
        assert fork == (None if is_first else RowFork(forest.row_of[parent], len(rows)))
        if fork is not None:
            path = forest.path(parent)
            assert rows[fork.source][: len(path)] == path
        check(forest, max_rows, max_tokens)


def test_there_is_room_up_to_the_last_row_and_token() -> None:
    forest = Forest([7], max_rows=2, max_tokens=4)
    assert forest.add(0, 1) == (1, None)
    assert forest.has_room(0)
    assert forest.add(0, 2) == (2, RowFork(0, 1))
    assert not forest.has_room(0), "no row is left"
    assert not forest.has_room(1), "no token is left"
    assert Forest([7], max_rows=2, max_tokens=1).has_room(0) is False


@given(
    num_roots=st.integers(1, 5),
    more_rows=st.integers(0, 40),
    more_tokens=st.integers(0, 150),
    num_layers=st.integers(1, 5),
    least_width=st.integers(1, 4),
    more_width=st.integers(0, 8),
    choose=st.randoms(use_true_random=False),
)
@settings(max_examples=200, deadline=None)
def test_what_is_affordable_has_room_whatever_is_drafted(
    num_roots: int,
    more_rows: int,
    more_tokens: int,
    num_layers: int,
    least_width: int,
    more_width: int,
    choose: np.random.Generator,
) -> None:
    limits = num_roots + more_rows, num_roots + more_tokens
    layers, drafts = affordable(num_roots, *limits, num_layers, least_width + more_width, least_width)
    assert (layers == 0) == (drafts == 0)
    assert layers <= num_layers
    forest, newest = Forest(range(num_roots), *limits), list(range(num_roots))
    for _ in range(layers):
        assert least_width <= drafts <= least_width + more_width
        newest = [forest.add(choose.choice(newest), token)[0] for token in range(drafts)]
    check(forest, *limits)


@pytest.mark.parametrize("num_roots", [1, 3])
@pytest.mark.parametrize("more_rows", [0, 4, 9, 40])
@pytest.mark.parametrize("more_tokens", [0, 3, 17, 60, 200])
def test_no_more_is_affordable(num_roots: int, more_rows: int, more_tokens: int) -> None:
    limits = num_roots + more_rows, num_roots + more_tokens
    layers, drafts = affordable(num_roots, *limits, num_layers=4, draft_width=50, least_width=3)
    if layers:
        assert not fits(num_roots, *limits, layers, drafts + 1)
    if layers < 4:
        assert not fits(num_roots, *limits, layers + 1, 3)


@pytest.mark.parametrize("num_roots", [1, 4])
@pytest.mark.parametrize("width", [1, 2, 4, 9])
def test_a_layer_is_affordable_with_the_least_room_and_with_no_less(num_roots: int, width: int) -> None:
    def layers(rows: int, tokens: int) -> int:
        return affordable(num_roots, num_roots + rows, num_roots + tokens, 3, 2 * width, width)[0]

    rows, tokens = least_affordable(width)
    assert layers(rows, tokens) == 1
    assert layers(rows - 1, 100) == layers(100, tokens - 1) == 0


def fits(num_roots: int, max_rows: int, max_tokens: int, num_layers: int, num_drafts: int) -> bool:
    """Whether a forest has room in which all drafts of a layer have the same parent, which costs most."""
    forest, parent = Forest(range(num_roots), max_rows, max_tokens), 0
    for _ in range(num_layers):
        for token in range(num_drafts):
            if not forest.has_room(parent):
                return False
            newest, _ = forest.add(parent, token)
        parent = newest
    return True


LOGPROBS = torch.tensor([[-0.5, -1.0, -9.0, -9.0], [-0.1, -3.0, -9.0, -9.0], [-0.2, -0.3, -9.0, -9.0]])
SCORES = torch.tensor([0.0, -1.0, -5.0])


@pytest.mark.parametrize(
    ("draft_width", "expected"),
    [
        (2, [(0, 0), (0, 1)]),  # of the beams 0 and 2: the beam of width 2 that goes on from them
        (3, [(0, 0), (0, 1), (1, 0)]),
        (5, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]),
    ],
)
def test_the_best_of_the_narrow_beam_come_first(draft_width: int, expected: list[tuple[int, int]]) -> None:
    forest = Forest([0, 0, 0], NO_LIMIT, NO_LIMIT)
    layer, forks = grow(forest, Layer([0, 1, 2], SCORES, {0, 2}), LOGPROBS, 2, draft_width)
    assert [(forest.parents[node], forest.tokens[node]) for node in layer.nodes] == expected
    assert layer.narrow == {0, 1}
    assert layer.scores.tolist() == pytest.approx([(SCORES[p] + LOGPROBS[p, t]).item() for p, t in expected])
    assert len(forks) == len(forest.rows) - 3


def test_the_narrow_beam_is_drafted_although_others_score_better() -> None:
    forest = Forest([0, 0, 0], NO_LIMIT, NO_LIMIT)
    layer, _ = grow(forest, Layer([0, 1, 2], SCORES, {2}), LOGPROBS, 1, 2)
    assert [(forest.parents[node], forest.tokens[node]) for node in layer.nodes] == [(2, 0), (0, 0)]
    assert layer.narrow == {0}


def test_what_there_is_no_room_for_is_left_out_the_worst_first() -> None:
    forest = Forest([0, 0, 0], max_rows=3, max_tokens=NO_LIMIT)
    layer, forks = grow(forest, Layer([0, 1, 2], SCORES, {0, 1, 2}), LOGPROBS, 3, 6)
    assert [(forest.parents[node], forest.tokens[node]) for node in layer.nodes] == [(0, 0), (1, 0), (2, 0)]
    assert forks == []
    assert layer.narrow == {0, 1}, "one of the narrow beam had no room"


def test_what_ends_or_is_dead_is_not_drafted() -> None:
    logprobs = LOGPROBS.clone()
    logprobs[:, 1:] = float("-inf")
    forest = Forest([0, 0, 0], NO_LIMIT, NO_LIMIT)
    dead = torch.tensor([0.0, float("-inf"), -5.0])
    layer, _ = grow(forest, Layer([0, 1, 2], dead, {0, 1, 2}), logprobs, 3, 9)
    assert [(forest.parents[node], forest.tokens[node]) for node in layer.nodes] == [(0, 0), (2, 0)]
    layer, forks = grow(forest, layer, torch.full((2, 4), float("-inf")), 3, 9)
    assert (layer.nodes, forks) == ([], [])
