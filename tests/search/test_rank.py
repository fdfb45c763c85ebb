"""The ranked candidates are the best of all, in total order, however many scores are equal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_trie.search.devices import pinned_search_tensors, search_arange
from vllm_trie.search.rank import MIN_TILES, TILE, SearchCandidates, rank_search_candidates, search_topk
from vllm_trie.search.step import search_log_probabilities

TOLERANCE = 1e-5
DEAD = float("-inf")  # which of the impossible continuations fill up the ranking does not matter
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rank(logits: torch.Tensor, scores: torch.Tensor, count: int, masked: Sequence[int] = ()) -> SearchCandidates:
    """The candidates on the host."""
    ranked = rank_search_candidates(search_log_probabilities(logits, tuple(masked)), scores, count)
    return SearchCandidates(*(field.numpy() for field in ranked))


def every_score(logits: torch.Tensor, scores: torch.Tensor, masked: Sequence[int]) -> torch.Tensor:
    """float32 [G, r, V], the sums that decide which scores are equal."""
    total = torch.log_softmax(logits.float(), dim=-1) + scores[..., None]
    total[..., list(masked)] = float("-inf")
    return total


def check_against_sorting_everything(
    logits: torch.Tensor, scores: torch.Tensor, count: int, masked: Sequence[int] = ()
) -> None:
    ranked = rank(logits, scores, count, masked)
    assert ranked.scores.dtype == np.float32
    total = every_score(logits, scores, masked)
    for table, *group in zip(total.tolist(), *ranked, strict=True):
        places = product(range(logits.shape[1]), range(logits.shape[2]))
        best = sorted(places, key=lambda place: (-table[place[0]][place[1]], *place))[:count]
        possible = [(parent, token, table[parent][token]) for parent, token in best if table[parent][token] > DEAD]
        found = [*zip(*(field.tolist() for field in group), strict=True)]
        assert found[: len(possible)] == possible
        assert len({candidate[:2] for candidate in found}) == count
        assert all(score == DEAD for _, _, score in found[len(possible) :])


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, list[int]]:
    """Logits of a few levels, rows that repeat each other, and any number of candidates and masked tokens."""
    groups, num_rows, vocab_size = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 40))
    most = num_rows * vocab_size
    count = draw(st.one_of(st.integers(1, most), st.integers(max(1, most - 2), most)))
    masked = draw(st.lists(st.integers(0, vocab_size - 1), max_size=4, unique=True))
    num_levels = draw(st.sampled_from([1, 2, 5, 1000]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 32)))
    logits = torch.randint(num_levels, (groups, num_rows, vocab_size), generator=random) * (9 / num_levels)
    if draw(st.booleans()):
        logits[..., 1::2] = float("-inf")  # forbidden already in the logits
    repeated = torch.randint(draw(st.integers(1, num_rows)), (num_rows,), generator=random)
    scores = -torch.randint(draw(st.integers(1, 3)), (groups, num_rows), generator=random) / 3
    return logits[:, repeated].to(draw(st.sampled_from(DTYPES))), scores, count, masked


@settings(max_examples=200, derandomize=True)
@given(problems())
def test_ranking_is_sorting_everything(problem: tuple[torch.Tensor, torch.Tensor, int, list[int]]) -> None:
    check_against_sorting_everything(*problem)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 16])
def test_normal_logits_of_a_large_vocabulary(dtype: torch.dtype, num_rows: int) -> None:
    random = torch.Generator().manual_seed(num_rows)
    logits = 4 * torch.randn(2, num_rows, 8000, generator=random)
    scores = -torch.rand(2, num_rows, generator=random)
    check_against_sorting_everything(logits.to(dtype), scores, 2 * num_rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [-200.0, 0.0, 200.0])
def test_scores_are_log_softmax_plus_the_rows_score(dtype: torch.dtype, offset: float) -> None:
    random = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(3, 8, 5000, generator=random) + offset).to(dtype)
    scores = -torch.rand(3, 8, generator=random)
    ranked = rank(logits, scores, 100)
    exact = (logits.double().log_softmax(-1) + scores[..., None]).numpy()
    groups = np.arange(3)[:, None]
    np.testing.assert_allclose(ranked.scores, exact[groups, ranked.parents, ranked.tokens], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("vocab_size", [4, 3000])
def test_equal_scores_go_to_the_lower_parent_then_the_lower_token(vocab_size: int) -> None:
    ranked = rank(torch.zeros(1, 3, vocab_size), torch.zeros(1, 3), 6)
    assert places(ranked) == [*product(range(3), range(vocab_size))][:6]


def test_equal_rows_interleave_by_parent() -> None:
    row = torch.tensor([1.0, 3.0, 2.0, 3.0])
    ranked = rank(row.expand(1, 2, 4), torch.zeros(1, 2), 6)
    assert places(ranked) == [(0, 1), (0, 3), (1, 1), (1, 3), (0, 2), (1, 2)]


@pytest.mark.parametrize("count", range(1, 8))
def test_tie_at_the_cut_goes_to_the_earliest(count: int) -> None:
    logits = torch.full((1, 1, 3000), 0.5, dtype=torch.bfloat16)
    logits[0, 0, 2999] = 1.0
    expected = [(0, 2999), *((0, token) for token in range(count - 1))]
    assert places(rank(logits, torch.zeros(1, 1), count)) == expected


def test_masked_token_ranks_last_and_keeps_its_share() -> None:
    logits, scores = torch.tensor([[[5.0, 1.0, 3.0, 2.0]]]), torch.tensor([[-1.0]])
    free = rank(logits, scores, 4)
    masked = rank(logits, scores, 4, [0])
    assert places(masked) == [(0, 2), (0, 3), (0, 1), (0, 0)]
    assert masked.scores[0].tolist() == [*free.scores[0, 1:].tolist(), DEAD]


def test_groups_do_not_see_each_other() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randint(4, (5, 3, 50), generator=random).bfloat16()
    scores = -torch.rand(5, 3, generator=random)
    together = rank(logits, scores, 20)
    for group in range(5):
        alone = rank(logits[group, None], scores[group, None], 20)
        for one, other in zip(together, alone, strict=True):
            np.testing.assert_array_equal(one[group], other[0])


def test_logits_are_left_as_they_were() -> None:
    logits = torch.arange(12.0).reshape(1, 3, 4)
    rank(logits, torch.zeros(1, 3), 5, [2])
    assert logits.flatten().tolist() == [*range(12)]


def places(ranked: SearchCandidates) -> list[tuple[int, int]]:
    """(parent, token) of the only group's candidates."""
    return [*zip(ranked.parents[0].tolist(), ranked.tokens[0].tolist(), strict=True)]


def test_searches_of_many_widths_share_what_is_cached() -> None:
    row = torch.zeros(1, 1, 60_000)
    with pinned_search_tensors() as tensors:
        for width in (64, *range(1, 65)):  # the widest first, as at an engine's start
            rank_search_candidates(row.expand(1, width, -1), torch.zeros(1, width), 2 * width)
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values()
    assert sum(sizes) < 4 * max(sizes)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 8, 9])
@pytest.mark.parametrize("last", [None, 0, 3])
def test_numbers_ascend_up_to_the_last(count: int, last: int | None) -> None:
    numbers = search_arange(count, torch.device("cpu"), last)
    assert numbers.tolist() == [number if last is None else min(number, last) for number in range(count)]


@pytest.mark.parametrize("spread", [0.0, 3.0, 60.0])
def test_wide_groups_rank_the_best_however_many_of_them_one_row_has(spread: float) -> None:
    """Scores far apart let one row have all of them, equal ones let all rows have some; ties are drawn in, too."""
    random = torch.Generator().manual_seed(int(spread))
    logits = (torch.randn(2, 100, 300, generator=random) * 3).round(decimals=1)
    scores = -torch.rand(2, 100, generator=random) * spread
    scores[1, 50:] = DEAD
    check_against_sorting_everything(logits, scores, 200)
    check_against_sorting_everything(logits, scores, 25_000)


@pytest.mark.parametrize("levels", [1, 3, 1000, 1 << 24])
@pytest.mark.parametrize("more", [0, 1, TILE - 1])
def test_the_best_of_a_large_vocabulary_are_found_by_tiles(levels: int, more: int) -> None:
    random = torch.Generator().manual_seed(levels)
    values = torch.randint(levels, (2, 3, MIN_TILES * TILE + more), generator=random) / levels
    values[0, 0, :-5] = DEAD
    values[0, 1, -more - 1 :] = 2.0
    for count in (1, 9, MIN_TILES // 4):
        best, tokens = search_topk(values, count)
        assert torch.equal(best, values.topk(count, dim=-1).values)
        assert torch.equal(best, values.gather(-1, tokens))
        assert all(len(set(row)) == count for row in tokens.flatten(0, 1).tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_of_a_large_vocabulary_go_to_the_lowest(dtype: torch.dtype) -> None:
    logits = (2 * torch.randn(1, 4, MIN_TILES * TILE + 9, generator=torch.Generator().manual_seed(0))).to(dtype)
    check_against_sorting_everything(logits.round(), torch.zeros(1, 4), 12)
