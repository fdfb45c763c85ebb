"""Iterations of speculative beam sampling have the distribution of beam sampling, and end where they must."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.exhaustive import random_pair, sampled_pair_distribution
from vllm_trie.search.filters import SearchFilters
from vllm_trie.search.sampling import joint_search_probabilities, search_generator
from vllm_trie.speculation.search import rejection
from vllm_trie.speculation.search.rejection import (
    AcceptedLayer,
    DraftAcceptanceRules,
    Drafts,
    accept_draft_layers,
    accept_drafts,
    sample_acceptable_drafts,
)

BOTH_LAWS = pytest.mark.parametrize("replacement", [True, False])


class Layers:
    """A target's distributions, one after the other, and what they were asked for."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor, last: torch.Tensor) -> None:
        self.distributions = [first, second, last]
        self.asked: list[AcceptedLayer | None] = []

    def __call__(self, verified: AcceptedLayer | None) -> torch.Tensor:
        self.asked.append(verified)
        return self.distributions[len(self.asked) - 1]


SURE = torch.eye(6).double()[0].view(2, 3)  # all mass in cell 0
OTHER = SURE.flip(0, 1)
NOTHING = torch.zeros(2, 3).double()


@pytest.mark.parametrize(
    ("distributions", "drafts"),
    [
        ([SURE, SURE, OTHER], [[0], [0], [-1]]),
        ([SURE, OTHER], [[0], [-1]]),
        ([OTHER], [[-1]]),
        ([SURE, NOTHING], [[0]]),
        ([SURE, SURE, NOTHING], [[0], [0]]),
        ([NOTHING], []),
    ],
)
def test_layers_go_on_until_one_is_incomplete_or_nothing_is_possible(
    distributions: list[torch.Tensor], drafts: list[list[int]]
) -> None:
    distribution = Layers(*[*distributions, *[NOTHING] * (3 - len(distributions))])
    rules, rng = DraftAcceptanceRules(1, 1), search_generator(0, 0)
    layers = list(accept_draft_layers([Drafts(SURE, np.array([0]))] * 2, distribution, rules, rng))
    assert [layer.drafts.tolist() for layer in layers] == drafts
    assert [layer.cells.tolist() for layer in layers] == [[int(p.argmax())] for p in distributions if p.any()]
    assert len(distribution.asked) == len(distributions)
    assert distribution.asked[0] is None
    assert all(asked is layer for asked, layer in zip(distribution.asked[1:], layers, strict=False))


@pytest.mark.parametrize(("threshold", "widths"), [(None, [4, 4]), (0.999, [2, 2]), (1e-9, [3, 3])])
def test_the_layer_after_the_drafts_is_as_wide_as_the_last(threshold: float | None, widths: list[int]) -> None:
    p, q = random_pair(0, (2, 3))
    rules = DraftAcceptanceRules(draft_width=3, max_width=4, min_width=2, threshold=threshold, replacement=True)
    distribution = Layers(p, p, p)
    seen = set()
    for seed in range(30):
        distribution.asked.clear()
        layers = list(
            accept_draft_layers(
                [sample_acceptable_drafts(q, rules, rng := search_generator(seed, 0))], distribution, rules, rng
            )
        )
        assert [len(layer.cells) for layer in layers] == widths[: len(layers)]
        seen.add(len(layers))
    assert seen == ({1} if threshold is None else {1, 2})  # three drafts cannot fill four beams


def test_without_drafts_one_layer_is_sampled_from_the_target() -> None:
    p, _ = random_pair(0, (2, 3))
    layers = list(
        accept_draft_layers([], Layers(p, p, p), DraftAcceptanceRules(1, 4, threshold=0.9), search_generator(0, 0))
    )
    assert [layer.drafts.tolist() for layer in layers] == [[-1] * 4]


Beam = tuple[int, ...]
Model = dict[Beam, torch.Tensor]
LENGTH, WIDTH, TOKENS = 3, 2, 4
RULES = {replacement: DraftAcceptanceRules(3, WIDTH, replacement=replacement) for replacement in (True, False)}


def toy_models(seed: int) -> tuple[Model, Model]:
    """A target and a draft model: log-probabilities [V] after every prefix."""
    rng = np.random.default_rng(seed)
    target, draft = {}, {}
    for length in range(LENGTH + 1):
        for prefix in product(range(TOKENS), repeat=length):
            p, other = rng.dirichlet(np.full(TOKENS, 0.7), size=2)
            target[prefix] = torch.from_numpy(np.log(p))
            draft[prefix] = torch.from_numpy(np.log(0.5 * p + 0.5 * other))
    return target, draft


def score(model: Model, beam: Beam) -> float:
    return float(sum(model[beam[:place]][token] for place, token in enumerate(beam)))


def distribution_of(model: Model, beams: list[Beam], scores: list[float]) -> torch.Tensor:
    return joint_search_probabilities(
        torch.tensor(scores), torch.stack([model[beam] for beam in beams]), SearchFilters()
    )


def children(beams: list[Beam], cells: np.ndarray) -> list[Beam]:
    return [(*beams[cell // TOKENS], int(cell % TOKENS)) for cell in cells]


def iterated(
    models: tuple[Model, Model], beams: list[Beam], rules: DraftAcceptanceRules, rng: np.random.Generator
) -> list[Beam]:
    """Beams after one iteration with at most two layers of drafts, cut off at the full length."""
    target, draft = models
    forest, scores = [beams], [score(target, beam) for beam in beams]  # drafts go on from the target's scores
    layers: list[Drafts] = []
    for _ in range(2):
        layers.append(sample_acceptable_drafts(distribution_of(draft, forest[-1], scores), rules, rng))
        forest.append(children(forest[-1], layers[-1].cells))
        parents = layers[-1].cells // TOKENS
        scores = [
            scores[parent] + float(draft[beam[:-1]][beam[-1]]) for parent, beam in zip(parents, forest[-1], strict=True)
        ]
        if len(forest[-1][0]) == LENGTH:
            break
    depth = 0

    def distribution(verified: AcceptedLayer | None) -> torch.Tensor:
        rows = forest[depth]
        kept = range(len(rows)) if verified is None else verified.drafts
        return distribution_of(
            target, rows, [score(target, rows[i]) if i in kept else -np.inf for i in range(len(rows))]
        )

    for verified in accept_draft_layers(layers, distribution, rules, rng):
        beams = children(forest[depth], verified.cells)
        depth += 1
        if len(beams[0]) == LENGTH:
            break
    return beams


def counts_by_simulation(models: tuple[Model, Model], rules: DraftAcceptanceRules, num_runs: int) -> np.ndarray:
    """[2, 64], how often each beam was which sequence."""
    counts = np.zeros((WIDTH, TOKENS**LENGTH))
    rng = search_generator(0, 0)
    for _ in range(num_runs):
        beams: list[Beam] = [()]
        while len(beams[0]) < LENGTH:
            beams = iterated(models, beams, rules, rng)
        for place, beam in enumerate(beams):
            counts[place, np.ravel_multi_index(beam, (TOKENS,) * LENGTH)] += 1
    return counts


def exact_law(target: Model, replacement: bool) -> np.ndarray:
    """[2, 64], the distribution of each beam of a beam sampling."""
    states: dict[tuple[Beam, ...], float] = {((),): 1.0}
    for _ in range(LENGTH):
        following: dict[tuple[Beam, ...], float] = defaultdict(float)
        for beams, probability in states.items():
            pairs = sampled_pair_distribution(
                distribution_of(target, list(beams), [score(target, beam) for beam in beams]), replacement
            )
            for pair in zip(*pairs.nonzero(), strict=True):
                following[tuple(children(list(beams), np.array(pair)))] += probability * pairs[pair]
        states = following
    distribution = np.zeros((WIDTH, TOKENS**LENGTH))
    for beams, probability in states.items():
        for place, beam in enumerate(beams):
            distribution[place, np.ravel_multi_index(beam, (TOKENS,) * LENGTH)] += probability
    return distribution


def deviations(counts: np.ndarray, distribution: np.ndarray) -> list[float]:
    """Of each beam: how many standard deviations chi-square is too large, rare sequences taken together."""
    excesses = []
    for seen, expected in zip(counts, distribution * counts.sum(axis=1, keepdims=True), strict=True):
        rare = expected < 5
        seen = np.append(seen[~rare], seen[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
        freedom = len(expected) - 1
        excesses.append(float((((seen - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)))
    return excesses


@BOTH_LAWS
def test_iterations_have_the_law_of_beam_sampling(replacement: bool) -> None:
    models = toy_models(0)
    counts = counts_by_simulation(models, RULES[replacement], 1500)
    assert max(deviations(counts, exact_law(models[0], replacement))) < 3


@pytest.mark.nightly
@BOTH_LAWS
def test_renormalising_over_valid_parents_changes_the_law(replacement: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def renormalised(p: torch.Tensor, q: torch.Tensor, *args: Any) -> AcceptedLayer:
        valid = q * (p.sum(dim=1, keepdim=True) > 0)
        return accept_drafts(p, valid / valid.sum(), *args)

    monkeypatch.setattr(rejection, "accept_drafts", renormalised)
    models = toy_models(0)
    counts = counts_by_simulation(models, RULES[replacement], 1500)
    assert max(deviations(counts, exact_law(models[0], replacement))) > 6
