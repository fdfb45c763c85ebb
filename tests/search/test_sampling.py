"""Tokens are drawn by the probabilities of their row, and by nothing but the seed and the step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_trie.search.sampling import draw, sampled_step, uniforms

DEAD = float("-inf")


def test_the_same_seed_and_step_draw_the_same() -> None:
    first = uniforms(7, 3, 5)
    uniforms(8, 1, 100)
    assert (uniforms(7, 3, 5) == first).all()
    assert (uniforms(7, 3, 8)[:5] == first).all()
    others = [uniforms(8, 3, 5), uniforms(7, 4, 5), uniforms(-7, 3, 5), uniforms((1 << 64) - 8, 3, 5)]
    assert len({tuple(row) for row in [first, *others]}) == 5


@pytest.mark.parametrize("seed", range(3))
def test_the_law_is_that_of_the_row(seed: int) -> None:
    logprobs = torch.tensor([[[-1.0, DEAD, -2.0, -0.5, -3.0, DEAD]]])
    draws = 20_000
    drawn = draw(logprobs, torch.from_numpy(uniforms(seed, 1, draws))[None, None])
    counts = torch.bincount(drawn.flatten(), minlength=6).double()
    expected = draws * logprobs[0, 0].double().softmax(-1)
    assert counts[expected == 0].sum() == 0
    chi_square = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert chi_square < 16.27  # 3 degrees of freedom, one in a thousand


def test_each_row_draws_from_its_own() -> None:
    logprobs = torch.full((2, 3, 6), DEAD)
    for place in range(6):
        logprobs[place // 3, place % 3, place] = 0.0
    drawn = draw(logprobs, torch.rand(2, 3, 4, dtype=torch.float64))
    assert torch.equal(drawn, torch.arange(6).reshape(2, 3, 1).expand(2, 3, 4))


@pytest.mark.parametrize("chance", [0.0, np.nextafter(1.0, 0.0)])
@pytest.mark.parametrize("spread", [0.0, 5.0, 40.0])
def test_the_impossible_is_not_drawn_at_either_end(chance: float, spread: float) -> None:
    logprobs = spread * torch.randn(1, 50, 1000, generator=torch.Generator().manual_seed(0))
    logprobs[..., :5] = logprobs[..., -5:] = DEAD
    drawn = draw(logprobs, torch.full((1, 50, 1), chance, dtype=torch.float64))
    assert (logprobs.gather(-1, drawn) > DEAD).all()


def test_where_nothing_may_be_drawn_some_impossible_token_stands_for_it() -> None:
    drawn = draw(torch.full((1, 1, 4), DEAD), torch.tensor([[[0.5]]], dtype=torch.float64))
    assert drawn.tolist() == [[[3]]]


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_beam_that_stops_finishes_and_leaves_its_slot_dead(num_rows: int) -> None:
    tokens, scores = np.array([[7, 1, 7]]), np.array([[-1.0, -2.0, -3.0]], dtype=np.float32)
    step = sampled_step(tokens, scores, tokens == 1, num_rows, is_last=False).group(0)
    assert step.parents.tolist() == ([0, 0, 0] if num_rows == 1 else [0, 1, 2])
    assert step.tokens.tolist() == [7, 1, 7]
    assert step.scores.tolist() == [-1.0, DEAD, -3.0]
    assert step.finished.tokens.tolist() == [1]
    last = sampled_step(tokens, scores, tokens == 1, num_rows, is_last=True).group(0)
    assert last.finished.scores.tolist() == [-1.0, -2.0, -3.0]
