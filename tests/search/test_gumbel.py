"""Taking maxima after Gumbel noise draws what it should: tokens, sets of tokens, and sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.exhaustive import sampled_pair_distribution
from vllm_trie.search import parts
from vllm_trie.search.gumbel import search_gumbel_top_k, stochastic_search_step
from vllm_trie.search.sampling import search_generator

NEVER = float("-inf")


@pytest.fixture(autouse=True, params=[parts.CELLS, 2], ids=["in one part", "in parts"])
def _cells(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "CELLS", request.param)


def deviation(counts: np.ndarray, distribution: np.ndarray) -> float:
    """How many standard deviations chi-square is too large, where the distribution is not zero."""
    assert counts[distribution == 0].sum() == 0
    expected = distribution[distribution > 0] * counts.sum()
    freedom = len(expected) - 1
    return float((((counts[distribution > 0] - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def pair_counts(pairs: torch.Tensor, num_cells: int) -> np.ndarray:
    counts = np.zeros((num_cells, num_cells))
    np.add.at(counts, tuple(pairs.numpy().T), 1)
    return counts


@pytest.mark.parametrize("offset", [0.0, -5000.0])
def test_the_maximum_is_a_draw_whatever_the_normalisation(offset: float) -> None:
    logs = torch.tensor([-1.0, NEVER, -2.0, -0.5, -3.0])
    _, sampled = search_gumbel_top_k((logs + offset).expand(1, 20_000, 5), 1, [search_generator(0, 1)])
    assert deviation(np.bincount(sampled.flatten(), minlength=5), logs.double().softmax(-1).numpy()) < 3


def test_the_top_two_are_sampled_one_after_the_other_without_replacement() -> None:
    logs = torch.tensor([-1.0, NEVER, -2.0, -0.5, -1.5]).double()
    (values,), (indices,) = search_gumbel_top_k(logs.expand(1, 20_000, 5), 2, [search_generator(0, 1)])
    distribution = sampled_pair_distribution(logs.softmax(-1), replacement=False)
    assert deviation(pair_counts(indices, 5), distribution) < 3
    as_one = np.sort(indices.numpy(), axis=1)
    assert deviation(pair_counts(torch.from_numpy(as_one), 5), np.triu(distribution + distribution.T)) < 3
    assert (values[:, 0] >= values[:, 1]).all()


def test_what_has_no_weight_is_marked() -> None:
    values, indices = search_gumbel_top_k(torch.tensor([[0.0, NEVER, NEVER]]), 2, [search_generator(0, 1)])
    assert indices[0, 0] == 0
    assert values[0, 1] == NEVER


def tree(seed: int, impossible: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [3] of the first token and [3, 3] of the second after each."""
    logs = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)).double()
    if impossible:
        logs[2, 1:] = NEVER
    logs = logs.log_softmax(-1)
    return logs[0], logs[1:]


@pytest.mark.parametrize("impossible", [False, True])
def test_stochastic_beams_are_leaves_without_replacement(impossible: bool) -> None:
    first, second = tree(0, impossible)
    rng, zero = search_generator(0, 1), torch.zeros(40_000, 1)
    beams = stochastic_search_step(zero, zero, first.expand(40_000, 1, 3), 2, rng)
    leaves = stochastic_search_step(beams.scores, beams.perturbed, second[beams.cells], 2, rng)
    prefixes = beams.cells.gather(-1, leaves.cells // 3)
    sequences = 3 * prefixes + leaves.cells % 3
    distribution = (first[:, None] + second).flatten()
    assert deviation(pair_counts(sequences, 9), sampled_pair_distribution(distribution.exp(), replacement=False)) < 3
    torch.testing.assert_close(leaves.scores, distribution[sequences])


def test_the_best_child_has_its_parents_noise() -> None:
    perturbed = torch.tensor([[3.0, -2.0, 700.0, NEVER]])
    scores = torch.tensor([[-1.0, -2.0, -800.0, NEVER]])
    logprobs = torch.randn(1, 4, 50, generator=torch.Generator().manual_seed(0)).mul(20).log_softmax(-1)
    logprobs[..., :5] = NEVER
    beams = stochastic_search_step(scores, perturbed, logprobs, 200, search_generator(0, 1))
    assert not beams.perturbed.isnan().any()
    children = torch.full((200,), NEVER).double().scatter(0, beams.cells[0], beams.perturbed[0]).view(4, 50)
    torch.testing.assert_close(children.amax(dim=1), perturbed[0].double())
    assert (children[:, :5] == NEVER).all()
    assert (children[:3, 5:] > NEVER).all()


def test_all_continuations_are_kept_if_they_are_fewer_than_asked_for() -> None:
    zero = torch.zeros(1)
    beams = stochastic_search_step(zero, zero, torch.zeros(1, 3).log_softmax(-1), 5, search_generator(0, 1))
    assert sorted(beams.cells.tolist()) == [0, 1, 2]
