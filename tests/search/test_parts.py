"""Rows that are taken part by part have the steps that they have together, whatever a part holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.search.test_item_trie import along_of
from tests.support.steps import rules_of, shortcuts
from vllm_trie.search import parts
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.catalog import ItemConstraint
from vllm_trie.search.constraints.constraint import Constraint
from vllm_trie.search.constraints.contrast import ContrastConstraint
from vllm_trie.search.constraints.grammar import GrammarConstraint
from vllm_trie.search.constraints.ngrams import NGramConstraint
from vllm_trie.search.constraints.phrase_boosts import PhraseBoostConstraint
from vllm_trie.search.constraints.stops import StopStringConstraint
from vllm_trie.search.filters import SearchFilters, SearchPruning, best_search_tokens, filter_search_logprobs
from vllm_trie.search.parts import in_search_parts
from vllm_trie.search.rules import SearchInputs, SearchStrategy
from vllm_trie.search.sampling import sample_search_continuations, sample_search_tokens, search_generator
from vllm_trie.search.step import take_packed_search_step, take_search_step
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.search.strategies.in_groups import DiverseGroupsStrategy
from vllm_trie.search.strategies.stochastic import StochasticStrategy

NEVER = float("-inf")
NUM_ROWS, VOCAB_SIZE = 6, 30
STOPS = (1, 2)
ITEMS = [(3, 4, 5), (3, 4, 6), (3, 9), (7, 8), *((10, token) for token in range(11, 25))]
CELLS = pytest.mark.parametrize("cells", [VOCAB_SIZE, 2 * VOCAB_SIZE, 5 * VOCAB_SIZE])


def states_under(constraint: Constraint, num_groups: int, random: torch.Generator) -> torch.Tensor:
    """Those of rows that are at different places."""
    of_tokens = num_groups, NUM_ROWS, VOCAB_SIZE
    if isinstance(constraint, GrammarConstraint):
        return torch.rand(of_tokens, generator=random) < 0.7
    if isinstance(constraint, ContrastConstraint):
        return torch.randn(of_tokens, generator=random).log_softmax(-1)
    histories = torch.randint(3, 12, (*of_tokens[:2], 9), dtype=torch.int32, generator=random)
    if isinstance(constraint, NGramConstraint):
        return histories
    states = constraint.begin(num_groups * NUM_ROWS, torch.device("cpu")).view(num_groups, NUM_ROWS)
    for row, tokens in enumerate([(), (3,), (3, 4), (10,), (7,), ()]):  # of ITEMS, behind 20 if they come after that
        for token in (20, *tokens)[getattr(getattr(constraint, "rules", None), "after", None) is None :]:
            states[:, row] = constraint.advance(states[:, row, None], torch.full((num_groups, 1), token))[:, 0]
    return states


UNDER: dict[str, tuple[Constraint, ...]] = {
    "nothing": (),
    "a catalog": (along_of(ITEMS, ItemConstraint(""), STOPS),),
    "a catalog after a token": (
        along_of(ITEMS, ItemConstraint("", 2, 20, ends_with_stop=True), STOPS),
        NGramConstraint(2),
    ),
    "a contrast": (ContrastConstraint(0.05, 0.5),),
    "a grammar": (GrammarConstraint(2),),
    "phrases": (PhraseBoostConstraint.of([([5, 6], 1.0), ([8], -0.5)]),),
}


@CELLS
@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("under", UNDER.values(), ids=UNDER)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"filters": SearchFilters(0.7, 0.01, 20, 0.95), "pruning": SearchPruning(1e-4, 9.0, 1e-3, 7)},
        {"pruning": SearchPruning(relative_local=0.02)},
    ],
    ids=["plain", "filters and pruning", "pruning by the best of all rows"],
)
@pytest.mark.parametrize(
    "strategy",
    [BestStrategy("hf"), BestStrategy("vllm", (1, 1.2)), BestStrategy("tridecode"), DiverseGroupsStrategy(2, 0.4, 0)],
)
def test_steps_are_the_same(
    strategy: SearchStrategy,
    options: dict[str, Any],
    under: tuple[Constraint, ...],
    looks: bool,
    cells: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = rules_of(NUM_ROWS, stops=STOPS, strategy=strategy, num_logprobs=3, **options)
    found = []
    for of_part in (parts.CELLS, cells):
        monkeypatch.setattr(parts, "CELLS", of_part)
        random = torch.Generator().manual_seed(0)
        for num_groups in (1, 2):
            logits = 3 * torch.randn(num_groups, NUM_ROWS, VOCAB_SIZE, generator=random)
            logits[:, 3] = logits[:, 2].round()  # so that some continuations tie
            scores = -torch.rand(num_groups, NUM_ROWS, generator=random)
            scores[0, 4] = NEVER
            states = {key: states_under(key, num_groups, random) for key in under}
            with shortcuts(looks):
                found.append(take_packed_search_step(rules, logits, SearchBeams(scores, states=states)).words)
    for together, in_parts_ in zip(found[:2], found[2:], strict=True):
        assert torch.equal(together, in_parts_)


def test_stop_strings_are_looked_for_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """More candidates are ranked where too many complete one."""
    rules = rules_of(NUM_ROWS, filters=SearchFilters(top_p=0.999))
    logits, found = torch.randn(1, NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)), []
    for of_part in (parts.CELLS, VOCAB_SIZE):
        monkeypatch.setattr(parts, "CELLS", of_part)
        completes = StopStringConstraint(lambda parents, tokens, _: (parents + tokens) % 5 != 0, torch.zeros(0))
        found.append(
            take_packed_search_step(
                rules, logits, SearchBeams(torch.zeros(1, NUM_ROWS)), SearchInputs(completes=completes)
            ).words
        )
    assert torch.equal(*found)


@given(
    st.integers(0, 1 << 32),
    st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999]),
    st.sampled_from([0.0, 0.02]),
    st.integers(1, 90),
)
@settings(max_examples=70, derandomize=True)
def test_a_long_row_keeps_what_a_sorted_one_keeps(seed: int, top_p: float, min_p: float, cells: int) -> None:
    random = torch.Generator().manual_seed(seed)
    logs = torch.randn(4, 90, dtype=torch.float64, generator=random).mul(4).log_softmax(-1) - 900
    logs[1] = logs[1].round()  # many are equal
    logs[2, 3:] = NEVER
    logs[3] = NEVER
    filters = SearchFilters(min_p=min_p, top_p=top_p)
    expected = filter_search_logprobs(logs.clone(), filters)
    with pytest.MonkeyPatch.context() as patch, shortcuts(allowed=False):
        patch.setattr(parts, "CELLS", cells)
        found = filter_search_logprobs(logs.clone(), filters)
    assert torch.equal(found, expected)


def test_equal_ones_of_a_long_row_are_kept_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "CELLS", 5)
    for value in (0.0, -3.0):
        with shortcuts(allowed=False):
            (found,) = filter_search_logprobs(
                torch.full((1, 20), value, dtype=torch.float64), SearchFilters(top_p=0.42)
            )
        assert (found > NEVER).tolist() == [True] * 9 + [False] * 11


@CELLS
def test_the_same_chances_draw_the_same(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(0)
    logprobs = 3 * torch.randn(2, NUM_ROWS, VOCAB_SIZE, generator=random)
    logprobs[torch.rand(logprobs.shape, generator=random) < 0.4] = NEVER
    logprobs[1, 2] = NEVER
    chances = torch.rand(2, NUM_ROWS, 500, dtype=torch.float64, generator=random)
    chances[..., :2] = torch.tensor([0.0, 1 - 2**-53])
    expected = sample_search_tokens(logprobs, chances)
    monkeypatch.setattr(parts, "CELLS", cells)
    tokens = sample_search_tokens(logprobs, chances)
    lives = (logprobs > NEVER).any(dim=-1)
    assert (logprobs.gather(-1, tokens)[lives] > NEVER).all()
    assert (tokens == expected).float().mean() > 0.999
    assert (tokens[~lives] == VOCAB_SIZE - 1).all()


@CELLS
def test_cells_are_sampled_from_all_parts_with_replacement(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    p = torch.rand(2, 5 * VOCAB_SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    p[0, 40:] *= p[0, 40:] > 0.6
    p[1] = 0
    rngs = lambda: [search_generator(0, 1), search_generator(0, 2)]  # noqa: E731
    expected, is_possible = sample_search_continuations(p, 400, True, rngs())
    monkeypatch.setattr(parts, "CELLS", cells)
    sampled, still_possible = sample_search_continuations(p, 400, True, rngs())
    assert (sampled == expected).float().mean() > 0.999
    assert torch.equal(is_possible, still_possible)
    assert (p[0, sampled[0]] > 0).all()


def test_parts_are_joined_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    values, scores, num_asked = torch.arange(2 * 5 * 3).view(2, 5, 3), torch.arange(10.0).view(2, 5), list[int]()

    def function(values: torch.Tensor, beams: SearchBeams) -> tuple[torch.Tensor, torch.Tensor]:
        num_asked.append(values.shape[1])
        return values + 1, values.sum(dim=-1) + beams.scores

    for cells, expected in ((12, [2, 2, 1]), (6, [1] * 5), (1, [1] * 5), (29, [4, 1]), (30, [5])):
        monkeypatch.setattr(parts, "CELLS", cells)
        num_asked.clear()
        added, summed = in_search_parts(values.shape, function, values, SearchBeams(scores))
        assert torch.equal(added, values + 1)
        assert torch.equal(summed, values.sum(dim=-1) + scores)
        assert num_asked == expected


@CELLS
def test_a_row_without_a_number_draws_nothing_and_keeps_no_other_from_it(
    cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what rows may not take, is not sampled of them in any part."""
    monkeypatch.setattr(parts, "CELLS", cells)
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(1, NUM_ROWS, VOCAB_SIZE, generator=random)
    logits[0, 1, 5] = torch.nan
    key = GrammarConstraint(2)
    allowed = states_under(key, 1, random)
    scores = torch.zeros(1, NUM_ROWS)
    for seed in range(20):
        beams = SearchBeams(scores, scores, {key: allowed})
        step = take_search_step(
            rules_of(NUM_ROWS, strategy=StochasticStrategy()), logits, beams, SearchInputs([(seed, 1)])
        )
        assert (step.scores > NEVER).all()
        assert allowed[0, step.parents[0], step.tokens[0]].all()
        assert not (step.parents == 1).any()


def test_the_best_are_counted_in_rows_of_any_length() -> None:
    values = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert best_search_tokens(values, 2, torch.tensor([[2.0]])).tolist() == [[False, True, True, False, False]]
    np.testing.assert_array_equal(
        best_search_tokens(values, 4, torch.tensor([[1.0]])), [[True, True, True, True, False]]
    )
