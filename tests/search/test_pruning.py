"""Pruning drops what a loop over the candidates drops, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import loop
from vllm_trie.search.filters import SearchPruning, pruned_search_logprobs
from vllm_trie.search.step import search_log_probabilities

DEAD = float("-inf")
GROUPS, ROWS, VOCAB_SIZE = 2, 4, 9
property_test = settings(max_examples=100, derandomize=True)
seeds = st.integers(0, 1 << 32)
ratios = st.one_of(st.none(), st.sampled_from([1e-3, 0.1, 0.5, 1.0]))
prunings = st.builds(
    SearchPruning,
    relative=ratios,
    absolute=st.one_of(st.none(), st.sampled_from([0.0, 0.7, 3.0])),
    relative_local=ratios,
    per_parent=st.one_of(st.none(), st.sampled_from([1, 2, 5, VOCAB_SIZE, 50])),
)


def problem(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [G, r, V] with ties and impossible tokens, and scores [G, r], some of dead rows."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randint(6, (GROUPS, ROWS, VOCAB_SIZE), generator=random) * 0.8
    logprobs = search_log_probabilities(logits, masked_token_ids=(4,))
    scores = -torch.randint(5, (GROUPS, ROWS), generator=random) / 4
    scores[0, torch.randint(ROWS, (1,), generator=random)] = DEAD
    return logprobs, scores


@property_test
@given(seeds, prunings)
def test_pruning_drops_what_a_loop_drops(seed: int, pruning: SearchPruning) -> None:
    logprobs, scores = problem(seed)
    before = logprobs.clone()
    ours = pruned_search_logprobs(logprobs, scores, pruning) + scores[..., None]
    assert torch.equal(logprobs, before)
    for group in range(GROUPS):
        alive = (scores[group] > DEAD).nonzero().flatten()
        sums = (logprobs + scores[..., None])[group, alive]
        theirs = loop.pruned(
            sums,
            scores[group, alive].tolist(),
            prune_relative=pruning.relative and pruning.relative * (1 - 1e-6),  # equal sums may round apart
            prune_absolute=float("inf") if pruning.absolute is None else pruning.absolute + 1e-6,
            prune_relative_local=pruning.relative_local and pruning.relative_local * (1 - 1e-6),
            max_candidates_per_parent=pruning.per_parent,
        )
        differing = ours[group, alive] != theirs
        at_the_edge = differing & ((sums.max() - sums - pruning.margin).abs() < 1e-5)
        assert torch.equal(differing, at_the_edge)
        assert (ours[group, scores[group] == DEAD] == DEAD).all()


@property_test
@given(seeds)
def test_neutral_values_change_nothing(seed: int) -> None:
    logprobs, scores = problem(seed)
    assert pruned_search_logprobs(logprobs, scores, SearchPruning()) is logprobs
    widest = SearchPruning(relative=1e-300, absolute=1e300, relative_local=1e-300, per_parent=VOCAB_SIZE)
    assert torch.equal(
        pruned_search_logprobs(logprobs, scores, widest) + scores[..., None], logprobs + scores[..., None]
    )


@property_test
@given(seeds)
def test_one_per_parent_keeps_every_parents_best(seed: int) -> None:
    logprobs, scores = problem(seed)
    kept = pruned_search_logprobs(logprobs, scores, SearchPruning(per_parent=1)) > DEAD
    assert (kept.sum(dim=-1) == 1).all()
    assert torch.equal(kept.int().argmax(dim=-1), logprobs.argmax(dim=-1))  # both name the first of equals


@property_test
@given(seeds, prunings)
def test_the_best_of_all_survives_all_but_the_local_rule(seed: int, pruning: SearchPruning) -> None:
    logprobs, scores = problem(seed)
    found = pruned_search_logprobs(logprobs, scores, pruning._replace(relative_local=None)) + scores[..., None]
    assert torch.equal(found.flatten(1).amax(dim=-1), (logprobs + scores[..., None]).flatten(1).amax(dim=-1))


@property_test
@given(seeds, prunings, prunings)
def test_each_rule_by_itself_drops_what_all_drop_together(seed: int, one: SearchPruning, other: SearchPruning) -> None:
    logprobs, scores = problem(seed)
    rules = one._replace(relative=None, absolute=None), other._replace(relative_local=None, per_parent=None)
    together = SearchPruning(rules[1].relative, rules[1].absolute, rules[0].relative_local, rules[0].per_parent)
    apart = [pruned_search_logprobs(logprobs, scores, rule) > DEAD for rule in rules]
    assert torch.equal(pruned_search_logprobs(logprobs, scores, together) > DEAD, apart[0] & apart[1])


@pytest.mark.parametrize("score", [-0.5, -50.0, -5000.0])
def test_bounds_are_differences_whatever_the_length(score: float) -> None:
    logprobs = torch.tensor([[[-1.0, -1.5, -2.0, -3.0]]])
    scores = torch.tensor([[score]])
    for pruning in (SearchPruning(relative=0.3), SearchPruning(absolute=1.2), SearchPruning(relative_local=0.3)):
        assert (pruned_search_logprobs(logprobs, scores, pruning) > DEAD).tolist() == [[[True, True, True, False]]]
