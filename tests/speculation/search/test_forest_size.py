"""The size of forests follows what steps cost and what was accepted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_trie.speculation.search.forest_size import (
    HOPE,
    PLAIN,
    DraftAcceptance,
    ForestCost,
    ForestSize,
    StepCosts,
    fastest_forest_size,
)

MOST_LAYERS, WIDTH = 4, 8


def costs_of(plain: float, per_verified: float, per_layer: float) -> StepCosts:
    """Costs that were measured without noise: a plain step of 4 tokens takes `plain` seconds."""
    costs, rng = StepCosts(), np.random.default_rng(0)
    for _ in range(40):
        tokens, layers, drafts = rng.integers(4, 60), rng.integers(1, 5), rng.integers(4, 40)
        costs.plain.observe((1, 4), plain)
        costs.verifying.observe((1, tokens), plain + per_verified * tokens)
        costs.drafting.observe((1, layers, drafts), per_layer * layers)
    return costs


def accepted(rate: float, forests: int = 400) -> DraftAcceptance:
    """What remains of many forests whose layers each led on with this probability."""
    acceptance, rng = DraftAcceptance(MOST_LAYERS), np.random.default_rng(1)
    for _ in range(forests):
        acceptance.observe(MOST_LAYERS, 1 + int((rng.random(MOST_LAYERS) < rate).cumprod().sum()))
    return acceptance


@given(st.lists(st.floats(0, 10), min_size=3, max_size=3), st.integers(0, 2**32))
def test_costs_are_found_again(true: list[float], seed: int) -> None:
    cost, rng = ForestCost(3), np.random.default_rng(seed)
    for _ in range(30):
        features = [1.0, *rng.integers(1, 100, size=2).tolist()]
        cost.observe(features, float(np.dot(true, features)))
    assert cost.expected(1, 7, 50) == pytest.approx(np.dot(true, [1, 7, 50]), rel=1e-3, abs=1e-3)


def test_no_cost_is_negative() -> None:
    cost = ForestCost(2)
    for tokens in range(10, 20):
        cost.observe((1, tokens), 30.0 - tokens)  # more tokens took less, by chance
    assert cost.expected(1, 1000) >= cost.expected(1, 10) > 0


def test_what_took_much_too_long_hardly_counts() -> None:
    cost = ForestCost(2)
    for _ in range(50):
        cost.observe((1, 4), 1.0)
    cost.observe((1, 4), 1000.0)
    assert cost.expected(1, 4) < 1.2
    for _ in range(100):
        cost.observe((1, 4), 5.0)
    assert cost.expected(1, 4) == pytest.approx(5.0, rel=0.05), "a lasting change is followed"


def test_rates_are_of_layers_that_were_reached() -> None:
    acceptance = DraftAcceptance(3)
    for _ in range(100):
        acceptance.observe(3, 2)  # the first layer led on, the second did not, the third was not reached
    first, second, third = acceptance.rates()
    assert first > 0.98
    assert second < 0.02
    assert third == HOPE
    steps = acceptance.expected_steps()
    assert steps == pytest.approx([1 + first, 1 + first * (1 + second), 1 + first * (1 + second * (1 + third))])


def test_of_what_others_found_less_remains_the_more_is_known() -> None:
    others = accepted(0.9)
    own = DraftAcceptance(MOST_LAYERS, others)
    assert own.rates() == pytest.approx(others.rates())
    for _ in range(50):
        own.observe(MOST_LAYERS, 1)
    assert own.rates()[0] < 0.1


def test_what_failed_is_hoped_for_again() -> None:
    acceptance = accepted(0.1, forests=40)
    before = acceptance.rates()[0]
    for _ in range(600):
        acceptance.forget()
    assert before < 0.15
    assert acceptance.rates()[0] > 0.6


def test_nothing_is_drafted_where_it_does_not_pay() -> None:
    dear = costs_of(plain=1.0, per_verified=0.1, per_layer=0.2)
    assert fastest_forest_size(dear, {WIDTH: accepted(0.9)}, MOST_LAYERS, 4) == PLAIN
    cheap = costs_of(plain=1.0, per_verified=0.001, per_layer=0.02)
    assert fastest_forest_size(cheap, {WIDTH: accepted(0.02)}, MOST_LAYERS, 4) == PLAIN
    assert fastest_forest_size(cheap, {WIDTH: accepted(0.9)}, MOST_LAYERS, 4) == ForestSize(MOST_LAYERS, WIDTH)
    assert fastest_forest_size(cheap, {WIDTH: accepted(0.9)}, 2, 4) == ForestSize(2, WIDTH)


def test_the_best_of_all_sizes_is_taken() -> None:
    costs = costs_of(plain=1.0, per_verified=0.02, per_layer=0.05)
    acceptance = {WIDTH: accepted(0.6), 2 * WIDTH: accepted(0.8)}

    def seconds_per_step(size: ForestSize) -> float:
        drafts = size.num_layers * size.draft_width
        seconds = 1.0 + 0.02 * (4 + drafts) + 0.05 * size.num_layers
        return seconds / acceptance[size.draft_width].expected_steps()[size.num_layers - 1]

    sizes = [ForestSize(layers, width) for layers in range(1, MOST_LAYERS + 1) for width in acceptance]
    best = fastest_forest_size(costs, acceptance, MOST_LAYERS, 4)
    assert best == min(sizes, key=seconds_per_step)
    assert seconds_per_step(best) < 1.0
