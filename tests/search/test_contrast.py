"""What beams do that contrast two models is what one reckons from the papers, token by token."""

from __future__ import annotations

from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.contrast import contrasted_scores, difference_scores
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.contrast import ContrastConstraint
from vllm_trie.search.constraints.stops import StopConstraints
from vllm_trie.search.filters import SearchFilters
from vllm_trie.search.rules import SearchRules
from vllm_trie.search.step import take_search_step
from vllm_trie.search.stopping import EndedSearchHypotheses, HfSearchPool
from vllm_trie.search.strategies.best import BestStrategy

VOCAB, STOP = 7, 1
seed, width = st.integers(0, 2**31), st.integers(1, 5)
alpha, beta = st.sampled_from([0.02, 0.1, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0, 7.0])


def random_logprobs(seed: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of an expert and an amateur: [*shape, V] float32 each."""
    expert, amateur = 2 * torch.randn(2, *shape, VOCAB, generator=torch.Generator().manual_seed(seed))
    return expert.log_softmax(-1), amateur.log_softmax(-1)


@given(seed, width, alpha, beta, st.booleans())
@settings(max_examples=70)
def test_each_step_keeps_what_counts_most_and_reports_the_expert_alone(
    seed: int, width: int, alpha: float, beta: float, is_last: bool
) -> None:
    key = ContrastConstraint(alpha, beta)
    rules = SearchRules(width, BestStrategy(), StopConstraints((STOP,)), constraints=(key,), is_last=is_last)
    expert, amateur = random_logprobs(seed, 1, width)
    scores, compete_by = -5 * torch.rand(2, 1, width, generator=torch.Generator().manual_seed(seed))
    compete_by += 4  # which may well be above 0
    step = take_search_step(rules, expert, SearchBeams(scores, compete_by, {key: amateur}))

    expected = [
        (compete_by[0, row].item() + gain, scores[0, row].item() + expert[0, row, token].item(), row, token)
        for row in range(width)
        for token, gain in enumerate(contrasted_scores(expert[0, row].tolist(), amateur[0, row].tolist(), alpha, beta))
        if gain > -inf
    ]
    expected.sort(reverse=True)
    expected = expected[: 2 * width]
    going_on = [found for found in expected if found[3] != STOP][:width]
    assert step.rank_scores is not None
    beams = zip(step.rank_scores.beams[0], step.scores[0], step.parents[0], step.tokens[0], strict=True)
    check([[value.item() for value in beam] for beam in beams], going_on)
    parents, tokens, sums = (field[0] for field in step.finished)
    finished = zip(step.rank_scores.finished[0], sums, parents, tokens, strict=True)
    ended = [found for found in expected[:width] if is_last or found[3] == STOP]
    check([[value.item() for value in end] for end in finished], ended)


def check(found: list[list[float]], expected: list[tuple[float, ...]]) -> None:
    """Raise AssertionError unless those that exist are as expected, in any order."""
    exist = sorted((one for one in found if one[0] > -inf), reverse=True)
    assert [one[2:] for one in exist] == [[*one[2:]] for one in expected]
    for one, other in zip(exist, expected, strict=True):
        assert one[:2] == pytest.approx(other[:2], abs=1e-4)


@given(seed, alpha)
@settings(max_examples=50)
def test_the_difference_of_log_probabilities_is_the_limit_of_large_beta(seed: int, alpha: float) -> None:
    """Beams compete alike if all scores are divided by beta; the expert's share of them vanishes."""
    expert, amateur = random_logprobs(seed)
    for beta in (10.0, 100.0, 1000.0):
        key = ContrastConstraint(alpha, beta)
        scores = key.narrow(expert, amateur) + key.boosts(amateur, expert, is_end=False)
        theirs = torch.tensor(difference_scores(expert.tolist(), amateur.tolist(), alpha))
        assert torch.equal(scores == -inf, theirs == -inf)
        plausible = theirs > -inf
        away = (scores / beta - theirs)[plausible].abs()
        assert (away <= expert[plausible].abs() / beta + 1e-5).all()


@given(seed, width)
@settings(max_examples=50)
def test_nothing_contrasted_is_the_filter_min_p(seed: int, width: int) -> None:
    expert, amateur = random_logprobs(seed, 1, width)
    scores, key = torch.zeros(1, width), ContrastConstraint(0.1, 0.0)
    plain = SearchRules(width, BestStrategy(), filters=SearchFilters(min_p=0.1))
    expected = take_search_step(plain, expert, SearchBeams(scores))
    found = take_search_step(
        SearchRules(width, BestStrategy(), constraints=(key,)), expert, SearchBeams(scores, states={key: amateur})
    )
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.parents, expected.parents)
    assert found.scores == pytest.approx(expected.scores)


def test_no_bound_ends_a_search_whose_sums_may_rise_without_one() -> None:
    pool = HfSearchPool(1, 1.0, 10, "never")
    pool.most_boost = ContrastConstraint(0.1, 0.5).most_boost
    pool.add(EndedSearchHypotheses.of([5.0], [STOP], [0], [0]), 3)
    assert not pool.is_done(-100.0, 4)
    assert not pool.is_decided(-100.0, 4)
    assert pool.is_done(-100.0, 10)


@pytest.mark.parametrize("spoils_amateur", [False, True])
def test_a_row_whose_logits_are_no_numbers_dies_alone(spoils_amateur: bool) -> None:
    key, width = ContrastConstraint(0.1, 0.5), 3
    rules = SearchRules(width, BestStrategy(), StopConstraints((STOP,)), constraints=(key,))
    expert, amateur = random_logprobs(0, 1, width)
    scores = torch.tensor([[-1.0, -1.5, -2.0]])
    without = take_search_step(
        rules, expert, SearchBeams(scores.clone().index_fill(1, torch.tensor(1), -inf), scores, {key: amateur})
    )
    (amateur if spoils_amateur else expert)[0, 1, 4] = torch.nan
    found = take_search_step(rules, expert.log_softmax(-1), SearchBeams(scores, scores, {key: amateur.log_softmax(-1)}))
    assert not (found.parents == 1).any()
    assert found.tokens.tolist() == without.tokens.tolist()
    torch.testing.assert_close(found.scores, without.scores)
