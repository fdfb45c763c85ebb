"""Groups of beams search by themselves, but for what the groups before them have taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.items import along_of
from tests.support.steps import rules_of, shortcuts, steps_of
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.catalog import NOT_STARTED, ConstraintAlongItems, ItemConstraint
from vllm_trie.search.constraints.stops import StopStringConstraint
from vllm_trie.search.group_pools import SearchGroupPools
from vllm_trie.search.rank import SearchCandidates
from vllm_trie.search.rules import SearchInputs
from vllm_trie.search.step import take_search_step
from vllm_trie.search.step_result import SearchStepResult, next_search_beams
from vllm_trie.search.stopping import EndedSearchHypotheses, HfSearchPool
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.search.strategies.in_groups import DiverseGroupsStrategy

NUM_SEARCHES, NUM_GROUPS, WIDTH, VOCAB = 3, 2, 3, 11
STOPS = (1, 4)


def completing(first: int) -> StopStringConstraint:
    """Some continuations of slots, which are counted from `first` on, complete a stop string."""
    return StopStringConstraint(lambda parents, tokens, _: (parents + tokens) % 4 == 0, torch.zeros(0)).of_rows(first)


def continued(step: SearchStepResult[np.ndarray], first: int) -> list[list[tuple[int, int, float]]]:
    """What goes on and what finishes, with parents counted from slot `first` on."""
    both = (step.parents, step.tokens, step.scores), step.finished
    return [[(p + first, t, s) for p, t, s in zip(*map(np.ndarray.tolist, fields), strict=True)] for fields in both]


@pytest.mark.parametrize("has_strings", [False, True])
@pytest.mark.parametrize("num_logprobs", [None, 2])
def test_groups_without_a_penalty_are_searches_of_their_own(has_strings: bool, num_logprobs: int | None) -> None:
    seeded = torch.Generator().manual_seed(0)
    logits = torch.randn(NUM_SEARCHES, NUM_GROUPS * WIDTH, VOCAB, generator=seeded)
    scores = -torch.rand(NUM_SEARCHES, NUM_GROUPS * WIDTH, generator=seeded)
    rules = rules_of(NUM_GROUPS * WIDTH, "hf", STOPS, num_logprobs=num_logprobs)
    rules = rules._replace(strategy=DiverseGroupsStrategy(NUM_GROUPS, 0.0, None))
    together = steps_of(rules, logits, scores, inputs=SearchInputs(completes=completing(0) if has_strings else None))
    for first in range(0, NUM_GROUPS * WIDTH, WIDTH):
        of_group, own = slice(first, first + WIDTH), rules._replace(width=WIDTH, strategy=BestStrategy())
        inputs = SearchInputs(completes=completing(first) if has_strings else None)
        alone = steps_of(own, logits[:, of_group], scores[:, of_group], inputs=inputs)
        for step, one in zip(together, alone, strict=True):
            ended = step.finished.parents // WIDTH == first // WIDTH
            finished = SearchCandidates(*(field[ended] for field in step.finished))
            part = step._replace(
                parents=step.parents[of_group], tokens=step.tokens[of_group], scores=step.scores[of_group]
            )
            assert continued(part._replace(finished=finished), 0) == continued(one, first)
            if num_logprobs is not None:
                assert step.beam_logprobs is not None
                assert one.beam_logprobs is not None
                assert (step.beam_logprobs.logprobs[of_group] == one.beam_logprobs.logprobs).all()


PREFIX_FREE = [(2, 3, 5), (2, 5, 6), (2, 5, 7), (3, 2), (3, 7, 8), (5, 2, 2), (5, 2, 6)]
ALONG = {
    "items": along_of([(2,), (2, 3), *PREFIX_FREE], ItemConstraint(""), STOPS),
    "items and a stop": along_of([(2,), (2, 3), *PREFIX_FREE], ItemConstraint("", ends_with_stop=True), STOPS),
    "two items": along_of(PREFIX_FREE, ItemConstraint("", 2), STOPS),
    "items after a token": along_of(PREFIX_FREE, ItemConstraint("", after=9, renormalizes=True), STOPS),
}


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("along", ALONG.values(), ids=ALONG)
def test_groups_without_a_penalty_go_along_a_catalog_as_searches_of_their_own(
    along: ConstraintAlongItems, looks: bool
) -> None:
    seeded = torch.Generator().manual_seed(0)
    logits = torch.randn(NUM_SEARCHES, NUM_GROUPS * WIDTH, VOCAB, generator=seeded)
    scores = -torch.rand(NUM_SEARCHES, NUM_GROUPS * WIDTH, generator=seeded)
    first_state = NOT_STARTED if along.rules.after is not None else 0
    states = torch.randint(first_state, along.rules.num_items * along.trie.num_nodes, scores.shape, generator=seeded)
    rules = rules_of(NUM_GROUPS * WIDTH, "hf", STOPS)._replace(strategy=DiverseGroupsStrategy(NUM_GROUPS, 0.0, None))
    with shortcuts(looks):
        before = SearchBeams(scores, states={along: states})
        together = take_search_step(rules, logits, before)
        for first in range(0, NUM_GROUPS * WIDTH, WIDTH):
            of_group, own = slice(first, first + WIDTH), rules._replace(width=WIDTH, strategy=BestStrategy())
            alone = take_search_step(own, logits[:, of_group], before.rows(of_group))
            assert (together.parents[:, of_group] == alone.parents + first).all()
            assert (together.tokens[:, of_group] == alone.tokens).all()
            assert (together.scores[:, of_group] == alone.scores).all()
            own, of_alone = (before.after(next_search_beams(step)).states[along] for step in (together, alone))
            assert (own[:, of_group] == of_alone).all()
            is_own = together.finished.parents // WIDTH == first // WIDTH
            for field, of_alone in zip(together.finished, alone.finished, strict=True):
                expected = of_alone + first if of_alone is alone.finished.parents else of_alone
                assert (field[is_own] == expected.flatten()).all()


@pytest.mark.parametrize("goes_along", [False, True])
@pytest.mark.parametrize(("done", "padding"), [((), 2), ((0,), 2), ((0,), None)])
def test_each_beam_before_takes_a_penalty_off_its_token(
    done: tuple[int, ...], padding: int | None, goes_along: bool
) -> None:
    """Of the prompt's four continuations the first group takes the best two, the second group all but the worst two."""
    logits, penalty = torch.tensor([[[3.0, 2.9, 2.8, 2.7]]]), 0.25
    rules = rules_of(4, strategy=DiverseGroupsStrategy(2, penalty, padding, done))
    along = along_of([(first, 0) for first in range(4)], ItemConstraint(""))
    under = [(along, along.begin(1, logits.device))] if goes_along else []
    (step,) = steps_of(rules, logits, torch.zeros(1, 1), *under)
    logprobs = logits[0, 0].log_softmax(-1)
    if done:
        assert (step.scores[:2] == -np.inf).all()
        logprobs[2] -= 0 if padding is None else 2 * penalty
    else:
        assert step.tokens[:2].tolist() == [0, 1]
        logprobs[:2] -= penalty
    best = logprobs.topk(2)
    assert step.tokens[2:].tolist() == best.indices.tolist()
    np.testing.assert_allclose(step.scores[2:], best.values, rtol=1e-6)


# Pools.


def pools(early_stopping: bool = False, items_end: bool = False) -> SearchGroupPools:
    return SearchGroupPools([HfSearchPool(2, 0.0, 3, early_stopping) for _ in range(2)], None if items_end else (1,))


def advanced(found: SearchGroupPools, *step: Any) -> tuple[list[int], bool]:
    outdone, is_over = found.advance(*step)
    return outdone.tolist(), is_over


def test_a_group_that_is_done_takes_in_nothing_more() -> None:
    found = pools()
    ended, running = (
        EndedSearchHypotheses.of([-1.0, -1.0], [1, 1], [10, 11], [0, 1]),
        np.array([-3.0, -4.0, -0.5, -0.6]),
    )
    assert advanced(found, ended, running, 1) == ([], False)
    assert found.done == (0,)
    outdone, is_over = found.advance(EndedSearchHypotheses.of([-0.1, -0.7], [1, 1], [12, 13], [0, 2]), running, 2)
    assert outdone.tolist() == [12]
    assert not is_over
    assert found.best(4).leaves.tolist() == [13, 10, 11]


def test_a_group_goes_on_while_a_candidate_that_stops_is_better_than_its_worst() -> None:
    found = pools()
    assert advanced(found, EndedSearchHypotheses.of([-1.0], [1], [10], [0]), np.array([-2.0, -3.0, -1.0, -1.0]), 1) == (
        [],
        False,
    )
    assert found.done == ()
    found.advance(EndedSearchHypotheses.of([-0.5], [1], [11], [0]), np.array([-9.0, -9.0, -1.0, -1.0]), 2)
    assert found.done == (), "the best candidate, -0.5, beats -1.0"


@pytest.mark.parametrize(("early_stopping", "leaves"), [(True, [10, 11, 14]), (False, [12, 10, 14])])
def test_what_runs_out_of_length_counts_unless_its_group_is_done(early_stopping: bool, leaves: list[int]) -> None:
    found = pools(early_stopping)
    found.advance(EndedSearchHypotheses.of([-1.0], [1], [10], [0]), np.array([-2.0, -3.0, -1.0, -1.0]), 2)
    ended = EndedSearchHypotheses.of([-0.5, -2.0, -3.0], [7, 1, 7], [12, 11, 14], [0, 1, 3])
    outdone, _ = found.advance(ended, np.array([-0.5, -5.0, -3.0, -4.0]), 3)
    assert found.best(4).leaves.tolist() == leaves
    assert {*outdone.tolist()} == {10, 11, 12} - {*leaves}


def test_beams_of_a_group_that_is_done_are_no_hypotheses_of_a_search_that_ends_early() -> None:
    found = pools(early_stopping=True)
    found.advance(
        EndedSearchHypotheses.of([-1.0, -1.5], [1, 1], [10, 11], [0, 0]), np.array([-0.1, -0.2, -1.2, -3.0]), 1
    )
    assert found.done == (0,)
    running = EndedSearchHypotheses.of([-0.1, -0.2, -1.2, -3.0], [7, 7, 7, 7], [20, 21, 22, 23], [0, 1, 2, 3])
    assert found.best_so_far(4, running, 1).leaves.tolist() == [10, 22, 11, 23]


def test_an_item_that_ends_with_the_length_counts_before_its_group_is_done() -> None:
    found = pools(items_end=True)
    found.advance(
        EndedSearchHypotheses.of([-1.0, -2.0], [7, 7], [10, 11], [0, 1]), np.array([-2.5, -3.0, -1.0, -1.0]), 2
    )
    none_runs = np.full(4, -np.inf)
    outdone, is_over = found.advance(EndedSearchHypotheses.of([-0.5], [7], [12], [0]), none_runs, 3)
    assert outdone.tolist() == [11]
    assert found.best(4).leaves.tolist() == [12, 10]
    assert is_over


def test_a_search_is_over_when_every_group_is_done_or_has_no_beam() -> None:
    found = pools(early_stopping=True)
    running = np.array([-3.0, -4.0, -np.inf, -np.inf])
    assert advanced(found, EndedSearchHypotheses.of([], [], [], []), running, 1) == ([], False)
    assert advanced(found, EndedSearchHypotheses.of([-1.0, -2.0], [1, 1], [10, 11], [0, 1]), running, 2) == ([], True)
