"""A layer is as wide as its drafts are likely to fill."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.exhaustive import branches, distance, random_pair, rejected_parent
from vllm_trie.search.sampling import search_generator
from vllm_trie.speculation.search.rejection import (
    DraftAcceptanceRules,
    DraftRejectionResidual,
    accept_drafts,
    acceptable_draft_width,
    draft_acceptance_distribution,
    sample_acceptable_drafts,
)


def counts_by_brute_force(p: torch.Tensor, q: torch.Tensor, num_drafts: int) -> np.ndarray:
    counts = np.zeros(num_drafts + 1)
    ways = branches(
        lambda rng: accept_drafts(p, q, rng.drafts(q, num_drafts, True), num_drafts, True, rng),
        num_drafts,
        lambda rng, p, count, replacement: np.zeros(count, dtype=np.int64),  # what fills a layer does not count
    )
    for rng, verified in ways:
        counts[(verified.drafts >= 0).sum()] += rng.probability
    return counts


@pytest.mark.parametrize("seed", range(3))
def test_the_number_accepted_has_the_law_that_widths_are_decided_by(seed: int) -> None:
    p, q = random_pair(seed, (1, 5))
    np.testing.assert_allclose(draft_acceptance_distribution(p, q, 4), counts_by_brute_force(p, q, 4), atol=1e-12)
    p, q = rejected_parent(seed)
    np.testing.assert_allclose(draft_acceptance_distribution(p, q, 3), counts_by_brute_force(p, q, 3), atol=1e-12)


def test_the_number_accepted_in_a_large_vocabulary() -> None:
    p, q = random_pair(0, (4, 200))
    counts, num_draws = np.zeros(7), 2000
    rng = search_generator(0, 1)
    for _ in range(num_draws):
        _, drafts = sample_acceptable_drafts(q, DraftAcceptanceRules(6, 6, replacement=True), rng)
        counts[(accept_drafts(p, q, drafts, 6, True, rng).drafts >= 0).sum()] += 1
    expected = num_draws * draft_acceptance_distribution(p, q, 6)
    chi_square = ((counts - expected) ** 2 / expected)[expected > 5].sum()
    assert chi_square < 22.5  # at most 6 degrees of freedom, one in a thousand


def test_updating_the_residual_twice_per_draft_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = random_pair(0, (1, 5))
    right, reject = draft_acceptance_distribution(p, q, 4), DraftRejectionResidual.reject
    monkeypatch.setattr(DraftRejectionResidual, "reject", lambda self: (reject(self), reject(self))[0])
    assert distance(draft_acceptance_distribution(p, q, 4), right) > 0.01


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.9])
def test_the_width_is_the_widest_that_drafts_fill_often_enough(threshold: float) -> None:
    num_otherwise = 0
    for seed in range(20):
        p, q = random_pair(seed, (1, 5))
        counts = counts_by_brute_force(p, q, 3)
        widest = max(width for width in range(4) if counts[width:].sum() >= threshold)
        assert acceptable_draft_width(p, q, 3, threshold, 0, 3) == widest
        # The paper's sum once starts at 1, which takes none accepted for a success.
        num_otherwise += widest != max(width for width in range(4) if 1 - counts[1:width].sum() >= threshold)
    assert num_otherwise > 0


def test_a_higher_threshold_makes_no_layer_wider() -> None:
    for seed in range(20):
        p, q = random_pair(seed, (3, 20), closeness=0.3)
        widths = [acceptable_draft_width(p, q, 6, threshold, 0, 6) for threshold in np.linspace(0.01, 1, 50)]
        assert widths == sorted(widths, reverse=True)
        assert widths[0] > widths[-1]


def test_widths_stay_within_their_bounds() -> None:
    p, q = random_pair(0, (3, 20))
    assert acceptable_draft_width(p, p, 6, 1.0, 1, 8) == 6
    assert acceptable_draft_width(p, p, 6, 0.9, 1, 4) == 4
    assert acceptable_draft_width(p, q, 6, 1.0, 2, 4) == 2
