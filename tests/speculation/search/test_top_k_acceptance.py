"""Drafts that are accepted by rank: what a loop over the rule finds, which is not the target's distribution."""

from __future__ import annotations

from itertools import permutations, product
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.support.exhaustive import Branches, distance, pair_distribution, random_pair, sampled_pair_distribution
from vllm_trie.search.sampling import search_generator
from vllm_trie.speculation.search import rejection
from vllm_trie.speculation.search.rejection import (
    AcceptedLayer,
    DraftAcceptanceRules,
    Drafts,
    accept_draft_layers,
    accept_drafts_by_rank,
)

BOTH_LAWS = pytest.mark.parametrize("replacement", [True, False])
NUM_TOKENS, NUM_DRAFTS = 5, 3
Pair = dict[tuple[int, int], float]


def chance(cells: tuple[int, ...], weights: list[float], taken: list[int], replacement: bool) -> float:
    """The probability to draw these cells one after the other, where some are taken already."""
    probability, left = 1.0, [0.0 if cell in taken and not replacement else w for cell, w in enumerate(weights)]
    for cell in cells:
        probability *= left[cell] / sum(left)
        if not replacement:
            left[cell] = 0.0
    return probability


def by_the_rule(p: list[float], q: list[float], top_k: int, replacement: bool) -> np.ndarray:
    """[N, N], the distribution of two beams: every way to draw drafts, and every way to fill what they leave."""
    best = sorted(range(len(p)), key=lambda cell: -p[cell])[:top_k]
    found = np.zeros((len(p), len(p)))
    ways = product(range(len(p)), repeat=NUM_DRAFTS) if replacement else permutations(range(len(p)), NUM_DRAFTS)
    for drafts in ways:
        accepted = [draft for draft in drafts if draft in best][:2]
        for rest in product(range(len(p)), repeat=2 - len(accepted)):
            of_drafts = chance(drafts, q, [], replacement)
            found[(*accepted, *rest)] += of_drafts * chance(rest, p, accepted, replacement)
    return found


def enumerated(p: torch.Tensor, q: torch.Tensor, top_k: int, replacement: bool) -> np.ndarray:
    """The same of `accept_drafts_by_rank`."""
    found, paths = np.zeros((p.numel(), p.numel())), [[]]

    def draw(left: torch.Tensor, count: int, replacement: bool, rng: Branches) -> np.ndarray:
        return rng.drafts(left, count, replacement).astype(np.int64)

    with patch.object(rejection, "sample_search_cells", draw):
        while paths:
            rng = Branches(paths.pop(), 2)
            drafts = rng.drafts(q, NUM_DRAFTS, replacement)
            found[tuple(accept_drafts_by_rank(p, drafts, 2, top_k, replacement, rng).cells)] += rng.probability
            paths += rng.others
    return found


@BOTH_LAWS
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_beams_are_distributed_as_the_rule_says_and_not_as_the_target(top_k: int, replacement: bool) -> None:
    p, q = random_pair(0, (1, NUM_TOKENS))
    found = enumerated(p, q, top_k, replacement)
    assert found.sum() == pytest.approx(1)
    assert distance(found, by_the_rule(p[0].tolist(), q[0].tolist(), top_k, replacement)) < 1e-9
    target = sampled_pair_distribution(p, replacement)
    assert distance(pair_distribution(p, q, NUM_DRAFTS, replacement), target) < 1e-9, "but by the exact rule"
    assert distance(found, target) > 0.05


def test_where_every_draft_is_accepted_beams_follow_the_draft_model() -> None:
    p, q = random_pair(0, (1, NUM_TOKENS))
    assert distance(enumerated(p, q, NUM_TOKENS, True), sampled_pair_distribution(q, True)) < 1e-9


def cold(logits: list[float]) -> torch.Tensor:
    return (torch.tensor([logits]).double() / 0.01).softmax(dim=-1)


@pytest.mark.parametrize("drafts", [[0, 1, 2], [4, 3, 2], [2, 4, 0], [0, 4, 3]])
@pytest.mark.parametrize(("width", "top_k"), [(1, 1), (2, 1), (2, 2), (3, 2), (3, 3)])
def test_as_the_temperature_falls_beams_are_the_best_whatever_is_drafted(
    width: int, top_k: int, drafts: list[int]
) -> None:
    p = cold([1.0, 3.0, 2.0, 0.5, 2.5])
    verified = accept_drafts_by_rank(p, np.array(drafts), width, top_k, False, search_generator(0, 0))
    assert {*verified.cells.tolist()} == {*[1, 4, 2][:width]}
    assert all(
        draft == -1 or drafts[draft] == cell for cell, draft in zip(verified.cells, verified.drafts, strict=True)
    )


def test_one_beam_by_the_best_continuation_is_greedy_search_as_the_temperature_falls() -> None:
    """Layer by layer, with drafts of which every second one is right."""
    targets = [cold([1.0, 3.0, 2.0]), cold([2.0, 1.0, 0.0]), cold([0.0, 1.0, 2.0])]
    drafted = [Drafts(cold([0.0, 0.0, 0.0]), np.array([draft])) for draft in (1, 2)]
    layers: list[AcceptedLayer] = []
    for verified in accept_draft_layers(
        drafted, lambda _: targets[len(layers)], DraftAcceptanceRules(1, 1, top_k=1), search_generator(0, 0)
    ):
        layers.append(verified)
    assert [layer.cells.tolist() for layer in layers] == [[1], [0]]
    assert [layer.drafts.tolist() for layer in layers] == [[0], [-1]]


def test_a_draft_that_the_target_rules_out_is_not_among_its_best() -> None:
    p = torch.tensor([[0.0, 0.6, 0.4, 0.0]]).double()
    verified = accept_drafts_by_rank(p, np.array([0, 3, 2]), 2, 4, False, search_generator(0, 0))
    assert verified.cells.tolist() == [2, 1]
    assert verified.drafts.tolist() == [2, -1]


def test_drafts_that_tie_for_the_last_place_are_all_accepted() -> None:
    p = torch.tensor([[0.2, 0.4, 0.2, 0.2]]).double()
    assert accept_drafts_by_rank(p, np.array([3, 0, 1]), 3, 2, False, search_generator(0, 0)).drafts.tolist() == [
        0,
        1,
        2,
    ]
