"""Verified drafts have beam sampling's distribution, exactly, and the ways that come close to it do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.exhaustive import (
    Branches,
    distance,
    draw,
    pair_distribution,
    random_pair,
    rejected_parent,
    sampled_pair_distribution,
)
from vllm_trie.search.sampling import search_generator
from vllm_trie.speculation.search.rejection import (
    Draft,
    DraftAcceptanceRules,
    DraftRejectionResidual,
    accept_drafts,
    sample_acceptable_drafts,
)

BOTH_LAWS = pytest.mark.parametrize("replacement", [True, False])
NUM_TOKENS, NUM_DRAFTS = 8, 4


@BOTH_LAWS
@pytest.mark.parametrize("seed", range(2))
def test_a_layer_has_the_targets_law(seed: int, replacement: bool) -> None:
    p, q = random_pair(seed, (1, NUM_TOKENS))
    assert distance(pair_distribution(p, q, NUM_DRAFTS, replacement), sampled_pair_distribution(p, replacement)) < 1e-9


@BOTH_LAWS
def test_a_layer_has_the_targets_law_although_a_draft_parent_was_rejected(replacement: bool) -> None:
    p, q = rejected_parent(0)
    assert distance(pair_distribution(p, q, 3, replacement), sampled_pair_distribution(p, replacement)) < 1e-9


@BOTH_LAWS
def test_renormalising_over_valid_parents_is_wrong(replacement: bool) -> None:
    p, q = rejected_parent(5)
    valid = q * (p.sum(dim=1, keepdim=True) > 0)
    distribution = pair_distribution(p, q, 3, replacement, tested=valid / valid.sum())
    assert distance(distribution, sampled_pair_distribution(p, replacement)) > 0.15


@pytest.mark.nightly
def test_the_ratio_printed_upside_down_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = DraftRejectionResidual.chance
    monkeypatch.setattr(DraftRejectionResidual, "chance", lambda self, draft: 1 / max(chance(self, draft), 1e-300))
    p, q = random_pair(0, (1, NUM_TOKENS))
    wrong = pair_distribution(p, q, NUM_DRAFTS, True) - sampled_pair_distribution(p, True)
    assert distance(wrong.sum(axis=1), np.zeros(NUM_TOKENS)) > 0.4


@pytest.mark.nightly
def test_going_on_with_the_residual_after_an_acceptance_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftRejectionResidual, "accept", lambda self, cells, sampled: None)
    p, q = random_pair(0, (1, NUM_TOKENS))
    assert distance(pair_distribution(p, q, NUM_DRAFTS, True), sampled_pair_distribution(p, True)) > 0.05


@pytest.mark.nightly
def test_verifying_the_likeliest_draft_first_is_wrong() -> None:
    p, q = random_pair(0, (1, NUM_TOKENS))
    distribution = pair_distribution(
        p, q, NUM_DRAFTS, True, arranged=lambda drafts: drafts[(-q[0].numpy()[drafts]).argsort()]
    )
    assert distance(distribution, sampled_pair_distribution(p, True)) > 0.25


@pytest.mark.nightly
def test_drafts_without_replacement_are_wrong_where_they_are_verified_as_with_it() -> None:
    p, q = random_pair(0, (1, NUM_TOKENS))
    distribution = pair_distribution(p, q, NUM_DRAFTS, True, sampled_with_replacement=False)
    assert distance(distribution, sampled_pair_distribution(p, True)) > 0.15
    assert distance(distribution, sampled_pair_distribution(p, False)) > 0.05


@pytest.mark.nightly
@pytest.mark.parametrize("source", ["residual", "target"])
def test_filling_a_layer_from_one_distribution_alone_is_wrong(source: str) -> None:
    p, q = random_pair(0, (1, NUM_TOKENS))

    def from_one_distribution(rng: Branches, distribution: torch.Tensor, count: int, replacement: bool) -> np.ndarray:
        rng.first_distribution = distribution if rng.first_distribution is None and count else rng.first_distribution
        return draw(rng, p if source == "target" else rng.first_distribution, count, replacement)

    distribution = pair_distribution(p, q, NUM_DRAFTS, True, draw=from_one_distribution)
    assert distance(distribution, sampled_pair_distribution(p, True)) > 0.04


@BOTH_LAWS
@pytest.mark.parametrize("is_defective", [False, True])
def test_residuals_equal_updates_one_by_one(replacement: bool, is_defective: bool) -> None:
    rng, num_compared = np.random.default_rng(0), 0
    for seed in range(200):
        p, q = random_pair(seed, (3, int(rng.integers(1, 9))), closeness=rng.random())
        if is_defective:
            p[1] = 0
            p /= p.sum()
        residual = DraftRejectionResidual(p, q, replacement)
        dense_p, dense_q, taken, sampled = p.flatten().clone(), q.flatten().clone(), [], []
        while len(sampled) < 5 and len(dense_q.nonzero()) > 1 and not residual.is_empty:
            torch.testing.assert_close(residual.distribution / residual.mass, dense_p, rtol=0, atol=1e-9)
            num_compared += 1
            cell = int(rng.choice(len(dense_q), p=dense_q.numpy()))
            left = 1.0 if replacement else 1 - float(q.flatten()[sampled].sum())
            draft = Draft(cell, float(p.flatten()[cell]), float(q.flatten()[cell]), left)
            ratio = float(dense_p[cell] / dense_q[cell])
            assert residual.chance(draft) == pytest.approx(ratio, rel=1e-6, abs=1e-9)
            sampled.append(cell)
            if rng.random() < ratio:
                taken.append(cell)
                residual.accept(np.array([cell]), np.array(sampled))
                dense_p = p.flatten().clone()
                dense_p[[] if replacement else taken] = 0
            else:
                dense_p = (dense_p - dense_q).clamp(min=0)
                assert residual.reject(left) == pytest.approx(float(dense_p.sum()), rel=1e-6, abs=1e-9)
                if dense_p.sum() < 1e-6:  # both ways are mostly rounding
                    break
            dense_p /= dense_p.sum()
            if not replacement:
                dense_q[cell] = 0
                dense_q /= dense_q.sum()
    assert num_compared > 400


@BOTH_LAWS
def test_where_rounding_alone_rejects_the_target_is_sampled_from(replacement: bool) -> None:
    p, _ = random_pair(0, (2, 4))
    residual = DraftRejectionResidual(p, p, replacement)
    assert residual.reject(1.0) < 1e-12
    torch.testing.assert_close(residual.distribution, p.flatten())


@BOTH_LAWS
def test_drafts_of_the_target_itself_are_all_accepted(replacement: bool) -> None:
    p, _ = random_pair(0, (3, 50))
    for seed in range(20):
        _, drafts = sample_acceptable_drafts(
            p, DraftAcceptanceRules(6, 6, replacement=replacement), rng := search_generator(seed, 1)
        )
        verified = accept_drafts(p, p, drafts, 6, replacement, rng)
        assert verified.is_complete
        assert verified.cells.tolist() == drafts.tolist()
        assert verified.drafts.tolist() == list(range(6))


def test_a_draft_the_target_rules_out_is_replaced() -> None:
    p, q = torch.tensor([[0.0, 0.0], [0.0, 1.0]]).double(), torch.tensor([[0.5, 0.5], [0.0, 0.0]]).double()
    verified = accept_drafts(p, q, np.array([1, 0]), 1, False, search_generator(0, 0))
    assert verified.cells.tolist() == [3]
    assert verified.drafts.tolist() == [-1]
    assert not verified.is_complete


def test_beams_are_no_more_than_there_are_possible_cells() -> None:
    p, q = torch.tensor([[0.7, 0.0, 0.3, 0.0]]).double(), torch.full((1, 4), 0.25).double()
    for seed in range(20):
        _, drafts = sample_acceptable_drafts(q, DraftAcceptanceRules(4, 4), rng := search_generator(seed, 1))
        verified = accept_drafts(p, q, drafts, 4, False, rng)
        assert sorted(verified.cells) == [0, 2]
        assert len(verified.drafts) == 2
        assert len(accept_drafts(p, q, drafts, 4, True, rng).cells) == 4


def test_nearly_certain_drafts_leave_the_rest_of_the_law_intact() -> None:
    """One minus the mass that was sampled would be zero here."""
    p = torch.tensor([[1 - 2e-17, 1.5e-17, 0.5e-17]]).double()
    verified = [accept_drafts(p, p, np.array([0, 1]), 2, False, search_generator(seed, 0)) for seed in range(50)]
    assert all(v.cells.tolist() == [0, 1] for v in verified)
