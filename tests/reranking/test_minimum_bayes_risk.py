"""Minimum Bayes risk beside the definitions of its papers, written out pair by pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_trie.reranking.minimum_bayes_risk import NUM_RESAMPLES, MetricError, Pairs, rank_by_risk

POOLS = st.lists(st.text("abc", max_size=4), min_size=1, max_size=12)


def overlap(hypothesis: str, reference: str) -> float:
    """Not symmetric, so that no one may swap the two."""
    return sum((Counter(hypothesis) & Counter(reference)).values()) - 0.25 * len(hypothesis)


def judge(pairs: Pairs) -> list[float]:
    return [overlap(*pair) for pair in pairs]


def expected_utilities(pool: list[str], weights: list[float]) -> list[float]:
    return [
        sum(w * overlap(text, other) for w, other in zip(weights, pool, strict=True)) / sum(weights) for text in pool
    ]


@given(POOLS, st.data())
def test_the_order_is_that_of_expected_utility(pool: list[str], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 5.0), min_size=len(pool), max_size=len(pool)))
    for given_weights, uniform in ((np.array(weights), False), (None, True)):
        ranking = rank_by_risk(pool, judge, given_weights)
        expected = expected_utilities(pool, [1.0] * len(pool) if uniform else weights)
        assert ranking.utilities == pytest.approx(expected)
        found = [ranking.utilities[place] for place in ranking.order]
        assert found == sorted(found, reverse=True)
        assert sorted(ranking.order) == list(range(len(pool)))


def test_equal_ones_stay_in_the_order_of_the_search() -> None:
    assert rank_by_risk(["b", "a", "b", "a"], lambda pairs: [1.0] * len(pairs)).order == [0, 1, 2, 3]


@given(POOLS, st.sampled_from([None, 0.9]))
def test_a_pair_of_texts_is_judged_once(pool: list[str], confidence: float | None) -> None:
    asked = Counter[tuple[str, str]]()

    def counting(pairs: Pairs) -> list[float]:
        asked.update(pairs)
        return judge(pairs)

    ranking = rank_by_risk(pool, counting, confidence=confidence)
    assert set(asked.values()) == {1}
    assert ranking.num_judged == asked.total()
    assert confidence is not None or ranking.num_judged == len(set(pool)) ** 2


def pruned_by_the_paper(
    utility: np.ndarray, order: np.ndarray, confidence: float, resamples: dict[int, np.ndarray]
) -> int:
    """Algorithm 1 of Cheng and Vlachos over a whole table, [hypotheses, references]; `resamples` are of algorithm 2."""
    alive, num_references = list(range(len(utility))), 8
    while True:
        num_references = min(num_references, len(order))
        seen = utility[:, order[:num_references]]
        best = max(alive, key=lambda hypothesis: (seen[hypothesis].mean(), -hypothesis))
        if num_references == len(order) or len(alive) == 1:
            return best
        kept = []
        for hypothesis in alive:
            wins = 0
            for counts in resamples[num_references]:
                wins += (counts * seen[hypothesis]).sum() >= (counts * seen[best]).sum()
            if hypothesis == best or wins / NUM_RESAMPLES > 1 - confidence:
                kept.append(hypothesis)
        alive, num_references = kept, 2 * num_references


@settings(max_examples=20)
@given(st.integers(9, 40), st.integers(0, 1 << 30), st.sampled_from([0.9, 0.99]))
def test_pruning_is_the_papers(size: int, seed: int, confidence: float) -> None:
    pool = [str(number) for number in range(size)]
    utility = np.random.default_rng(seed).integers(0, 100, (size, size)) + np.arange(size)[:, None] % 40.0
    rng, resamples, num_references = np.random.default_rng(0), dict[int, np.ndarray](), 8
    order = rng.permutation(size)
    while num_references < size:
        resamples[num_references] = rng.multinomial(
            num_references, [1 / num_references] * num_references, NUM_RESAMPLES
        )
        num_references *= 2

    def look_up(pairs: Pairs) -> list[float]:
        return [utility[int(hypothesis), int(reference)] for hypothesis, reference in pairs]

    ranking = rank_by_risk(pool, look_up, confidence=confidence)
    assert ranking.order[0] == pruned_by_the_paper(utility, order, confidence, resamples)
    assert ranking.num_judged <= size**2


def test_pruning_spares_pairs_and_keeps_a_clear_winner_and_as_many_as_are_asked_for() -> None:
    quality = np.random.default_rng(1).permutation(64)

    def by_quality(pairs: Pairs) -> list[float]:
        return [quality[int(hypothesis)] + int(reference) % 3 for hypothesis, reference in pairs]

    pool = [str(number) for number in range(64)]
    expected = np.argsort(-quality).tolist()
    for num_best in (1, 5):
        ranking = rank_by_risk(pool, by_quality, confidence=0.99, num_best=num_best)
        assert ranking.order[:num_best] == expected[:num_best]
        assert ranking.num_judged < 64**2 / 4


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "1 numbers for 4 pairs; return one for each"),
        ([1.0, 2.0, float("nan"), 1.0], "returned nan for pair 2 of 4; return finite numbers"),
        ([1.0, "many", 1.0, 1.0], "what is not a number"),
        (5, "what is not a number"),
    ],
)
def test_what_is_no_number_for_each_pair_is_refused(returned: Any, message: str) -> None:
    def broken(pairs: Pairs) -> Iterable[Any]:
        return returned

    with pytest.raises(MetricError, match=message):
        rank_by_risk(["a", "b"], broken)
