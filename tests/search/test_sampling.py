"""What is sampled is sampled by its probability, and by nothing but the seed and the step."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.support.exhaustive import sampled_pair_distribution
from tests.support.steps import rules_of
from vllm_trie.search import parts
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.filters import SearchFilters
from vllm_trie.search.rules import SearchInputs, SearchRules
from vllm_trie.search.sampling import (
    joint_search_probabilities,
    sample_search_cells,
    sample_search_continuations,
    sample_search_tokens,
    search_generator,
    search_uniforms,
)
from vllm_trie.search.step import search_log_probabilities, take_packed_search_step, take_search_step
from vllm_trie.search.step_result import SearchStepResult, pack_search_step, unpack_search_steps
from vllm_trie.search.strategies import sampled as sampled_each
from vllm_trie.search.strategies.joint_sampling import JointSamplingStrategy, best_beam_of_strategy
from vllm_trie.search.strategies.sampled import RowSamplingStrategy

DEAD = float("-inf")


@pytest.fixture(autouse=True, params=[parts.CELLS, 2], ids=["in one part", "in parts"])
def _cells(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "CELLS", request.param)


def test_the_same_seed_and_step_draw_the_same() -> None:
    first = search_uniforms(7, 3, 5)
    search_uniforms(8, 1, 100)
    assert (search_uniforms(7, 3, 5) == first).all()
    assert (search_uniforms(7, 3, 8)[:5] == first).all()
    assert (search_generator(7, 3).random(5) == first).all()
    others = [
        search_uniforms(8, 3, 5),
        search_uniforms(7, 4, 5),
        search_uniforms(-7, 3, 5),
        search_uniforms((1 << 64) - 8, 3, 5),
    ]
    assert len({tuple(row) for row in [first, *others]}) == 5


@pytest.mark.parametrize("seed", range(3))
def test_the_distribution_is_that_of_the_row(seed: int) -> None:
    logprobs = torch.tensor([[[-1.0, DEAD, -2.0, -0.5, -3.0, DEAD]]])
    draws = 20_000
    tokens = sample_search_tokens(logprobs, torch.from_numpy(search_uniforms(seed, 1, draws))[None, None])
    counts = torch.bincount(tokens.flatten(), minlength=6).double()
    expected = draws * logprobs[0, 0].double().softmax(-1)
    assert counts[expected == 0].sum() == 0
    chi_square = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert chi_square < 16.27  # 3 degrees of freedom, one in a thousand


def test_each_row_draws_from_its_own() -> None:
    logprobs = torch.full((2, 3, 6), DEAD)
    for place in range(6):
        logprobs[place // 3, place % 3, place] = 0.0
    tokens = sample_search_tokens(logprobs, torch.rand(2, 3, 4, dtype=torch.float64))
    assert torch.equal(tokens, torch.arange(6).reshape(2, 3, 1).expand(2, 3, 4))


@pytest.mark.parametrize("chance", [0.0, np.nextafter(1.0, 0.0)])
@pytest.mark.parametrize("spread", [0.0, 5.0, 40.0])
def test_the_impossible_is_not_sampled_at_either_end(chance: float, spread: float) -> None:
    logprobs = spread * torch.randn(1, 50, 1000, generator=torch.Generator().manual_seed(0))
    logprobs[..., :5] = logprobs[..., -5:] = DEAD
    tokens = sample_search_tokens(logprobs, torch.full((1, 50, 1), chance, dtype=torch.float64))
    assert (logprobs.gather(-1, tokens) > DEAD).all()


def test_where_nothing_may_be_sampled_some_impossible_token_stands_for_it() -> None:
    tokens = sample_search_tokens(torch.full((1, 1, 4), DEAD), torch.tensor([[[0.5]]], dtype=torch.float64))
    assert tokens.tolist() == [[[3]]]


SAMPLED = rules_of(3, stops=(1,), strategy=RowSamplingStrategy())


def sampled(rules: SearchRules, logits: torch.Tensor, chances: torch.Tensor) -> list[SearchStepResult]:
    beams, draws = SearchBeams(torch.zeros(logits.shape[:2])), [(0, group) for group in range(len(logits))]
    with patch.object(sampled_each, "search_uniforms", lambda _, group, __: chances[group].numpy()):
        taken = take_packed_search_step(rules, logits, beams, SearchInputs(draws))
    return unpack_search_steps(taken.words.numpy(), taken.layout)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_beam_that_stops_finishes_and_leaves_its_slot_dead(num_rows: int) -> None:
    logits = torch.zeros(1, num_rows, 4)
    logits[..., 2:] = DEAD
    chances = torch.tensor([[0.1, 0.9, 0.2]]).double()
    (step,) = sampled(SAMPLED, logits, chances)
    assert step.parents.tolist() == ([0, 0, 0] if num_rows == 1 else [0, 1, 2])
    assert step.tokens.tolist() == [0, 1, 0]
    assert (step.scores > DEAD).tolist() == [True, False, True]
    assert step.finished.tokens.tolist() == [1]
    (last,) = sampled(SAMPLED._replace(is_last=True), logits, chances)
    assert last.finished.tokens.tolist() == [0, 1, 0]


def test_a_row_that_may_take_nothing_neither_goes_on_nor_finishes() -> None:
    logits = torch.zeros(1, 3, 4)
    logits[0, 1] = DEAD
    rules = SAMPLED._replace(is_controlled=True, is_last=True)
    (step,) = sampled(rules, logits, torch.full((1, 3), 0.9).double())
    assert (step.scores > DEAD).tolist() == [True, False, True]
    assert step.finished.parents.tolist() == [0, 2]


@pytest.mark.parametrize("replacement", [True, False])
def test_groups_that_draw_do_not_see_each_other(replacement: bool) -> None:
    logits = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0))
    scores = -torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
    scores[1, 2] = DEAD
    rules = rules_of(4, stops=(1, 2), num_logprobs=2, strategy=JointSamplingStrategy(replacement, 1, None, False))

    def steps(of: range) -> list[SearchStepResult]:
        draws = [(at, 5) for at in of]
        taken = take_packed_search_step(rules, logits[of], SearchBeams(scores[of]), SearchInputs(draws))
        return unpack_search_steps(taken.words.numpy(), taken.layout)

    together = steps(range(3))
    for at in range(3):
        (alone,) = steps(range(at, at + 1))
        assert repr(alone) == repr(together[at])


def test_only_the_best_sampled_beam_goes_on_where_one_is_kept() -> None:
    logits = torch.randn(2, 4, 50, generator=torch.Generator().manual_seed(0))
    rules = rules_of(4, stops=(1,), num_logprobs=3, strategy=JointSamplingStrategy(False, 1, None, False))
    beams, inputs = SearchBeams(torch.zeros(2, 4)), SearchInputs([(at, 5) for at in range(2)])
    every = take_search_step(rules, logits, beams, inputs)
    kept = take_search_step(rules._replace(strategy=JointSamplingStrategy(False, 1, None, True)), logits, beams, inputs)
    best = every.scores.argmax(dim=1, keepdim=True)
    for one, other in zip(kept[:3], every[:3], strict=True):
        assert torch.equal(one, other.gather(1, best))
    assert kept.beam_logprobs is not None
    assert every.beam_logprobs is not None
    assert torch.equal(kept.beam_logprobs.ranks, every.beam_logprobs.ranks.gather(1, best))
    packed = pack_search_step(every, rules.layout(*logits.shape[1:]))
    for at, step in enumerate(unpack_search_steps(packed.words.numpy(), packed.layout)):
        on_host = best_beam_of_strategy(step)
        assert on_host.tokens.tolist() == kept.tokens[at].tolist()
        assert on_host.scores.tolist() == kept.scores[at].tolist()


def beams(num_rows: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    logprobs = torch.randn(num_rows, num_tokens, generator=rng).mul(2).log_softmax(-1)
    return torch.randn(num_rows, generator=rng) - 1000, logprobs


def test_the_joint_distribution_is_over_all_continuations_of_all_beams() -> None:
    scores, logprobs = beams(4, 1000)
    p = joint_search_probabilities(scores, logprobs, SearchFilters())
    assert p.dtype == torch.float64
    assert float(p.sum()) == pytest.approx(1, abs=1e-13)
    torch.testing.assert_close(p.sum(dim=1), scores.double().softmax(-1), rtol=1e-5, atol=0)
    torch.testing.assert_close(p[2] / p[2].sum(), logprobs[2].double().exp(), rtol=1e-5, atol=0)


def test_the_temperature_of_the_joint_distribution_divides_cumulative_sums() -> None:
    scores, logprobs = beams(2, 3)
    p = joint_search_probabilities(scores, logprobs, SearchFilters(temperature=0.5))
    weights = (2 * (scores[:, None] + logprobs).double()).flatten().softmax(-1)
    torch.testing.assert_close(p.flatten(), weights, rtol=1e-4, atol=0)


def test_filters_apply_once_to_the_joint_distribution() -> None:
    scores, logprobs = torch.tensor([0.0, 0.0]), torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.06, 0.04]]).log()
    for filters in (SearchFilters(top_k=2), SearchFilters(top_p=0.6), SearchFilters(min_p=0.5)):
        p = joint_search_probabilities(scores, logprobs, filters).flatten()
        assert p.nonzero().flatten().tolist() == [0, 3]
        torch.testing.assert_close(p[[0, 3]], torch.tensor([5 / 14, 9 / 14]).double())


@pytest.mark.parametrize("spoiled", [float("nan"), float("inf")])
def test_a_row_whose_logits_are_no_numbers_has_no_mass(spoiled: float) -> None:
    scores, logprobs = beams(3, 5)
    without = joint_search_probabilities(scores.index_fill(0, torch.tensor(1), DEAD), logprobs, SearchFilters())
    logits = logprobs.clone()
    logits[1, 2] = spoiled
    p = joint_search_probabilities(scores, search_log_probabilities(logits), SearchFilters())
    torch.testing.assert_close(p, without, rtol=1e-5, atol=0)


def test_dead_rows_have_no_mass() -> None:
    scores, logprobs = beams(3, 5)
    scores[1] = DEAD
    p = joint_search_probabilities(scores, logprobs, SearchFilters(temperature=0.7, top_k=20))
    assert p[1].sum() == 0
    assert float(p.sum()) == pytest.approx(1)
    nothing = joint_search_probabilities(torch.full((3,), DEAD), logprobs, SearchFilters(top_p=0.9))
    assert not nothing.any()
    assert [
        len(sample_search_cells(nothing, 2, replacement, search_generator(0, 0))) for replacement in (True, False)
    ] == [0, 0]


@pytest.mark.parametrize("replacement", [True, False])
def test_cells_are_sampled_by_their_law_in_order(replacement: bool) -> None:
    p = 3 * torch.tensor([[0.4, 0.0, 0.2], [0.0, 0.1, 0.3]]).double()  # need not be normalised
    rng, counts, num_draws = search_generator(0, 1), np.zeros((6, 6)), 4_000
    for _ in range(num_draws):
        counts[tuple(sample_search_cells(p, 2, replacement, rng))] += 1
    distribution = sampled_pair_distribution(p / p.sum(), replacement)
    expected = num_draws * distribution[distribution > 0]
    assert counts[distribution == 0].sum() == 0
    assert ((counts[distribution > 0] - expected) ** 2 / expected).sum() < (
        37.7 if replacement else 31.3
    )  # 15 and 11 degrees


@pytest.mark.parametrize("replacement", [True, False])
def test_what_is_not_possible_is_marked(replacement: bool) -> None:
    p = torch.tensor([[0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]).double()
    cells, is_possible = sample_search_continuations(
        p, 3, replacement, [search_generator(0, 1), search_generator(0, 2)]
    )
    assert is_possible.sum(dim=1).tolist() == [3 if replacement else 2, 0]
    assert set(cells[is_possible].tolist()) <= {1, 2}


def test_without_replacement_there_are_no_more_cells_than_are_possible() -> None:
    p = torch.tensor([[0.0, 0.5], [0.5, 0.0]]).double()
    assert sorted(sample_search_cells(p, 5, False, search_generator(0, 1))) == [1, 2]
    assert len(sample_search_cells(p, 5, True, search_generator(0, 1))) == 5


def test_without_replacement_a_cold_draw_is_beam_search() -> None:
    scores = torch.tensor([0.0, -0.5, -3.25])
    logprobs = -torch.randperm(100, generator=torch.Generator().manual_seed(0)).float().expand(3, 100)
    best = (scores[:, None] + logprobs).flatten().topk(8).indices.tolist()
    cold, warm = (
        joint_search_probabilities(scores, logprobs, SearchFilters(temperature)) for temperature in (0.01, 1.0)
    )
    assert all(sample_search_cells(cold, 8, False, search_generator(seed, 1)).tolist() == best for seed in range(20))
    assert not any(
        sample_search_cells(warm, 8, False, search_generator(seed, 1)).tolist() == best for seed in range(20)
    )
