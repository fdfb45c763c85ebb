"""Each pool of finished hypotheses scores as its model does, and is settled when nothing running can enter it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.utils import GenerationMixin

from tests.support.steps import offer
from vllm_trie.search.stopping import (
    EarlyStopping,
    EndedSearchHypotheses,
    HfSearchPool,
    SearchHypothesisPool,
    VllmSearchPool,
)

PROMPT_LENGTH = 5
MAX_LENGTH = 14
SEARCHES = 80
EOS = 1
TOKEN = 7  # any that counts
PENALTIES = [-1.0, 0.0, 0.5, 1.0, 2.0]


class Ranked(NamedTuple):
    """The candidates of one step, best first: [2 * width]."""

    log_probs: torch.Tensor
    stops: torch.Tensor  # bool: ends in a stop token or at the maximum length
    nodes: torch.Tensor


def random_search(width: int, seed: int) -> Iterator[Ranked]:
    """The candidates of every step up to the maximum length."""
    choose = np.random.default_rng(seed)
    stop_rate, loss = choose.uniform(0.05, 0.9), choose.uniform(0.05, 2.0)
    best = 0.0
    for length in range(1, MAX_LENGTH + 1):
        log_probs = np.sort(best - choose.exponential(loss, 2 * width)).astype(np.float32)[::-1]
        stops = np.zeros(2 * width, dtype=bool)
        stops[choose.choice(2 * width, choose.binomial(width, stop_rate), replace=False)] = True
        best = float(log_probs[~stops][0])
        stops |= length == MAX_LENGTH
        nodes = 100 * length + np.arange(2 * width)
        yield Ranked(*(torch.from_numpy(field.copy()) for field in (log_probs, stops, nodes)))


class TransformersPool:
    """The finished beams of one search as transformers keeps them."""

    def __init__(self, width: int, length_penalty: float, early_stopping: EarlyStopping) -> None:
        self.width = width
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.length = 0
        self.nodes = torch.zeros(1, width, 1, dtype=torch.long)
        self.scores = torch.full((1, width), -1e9)
        self.is_finished = torch.zeros(1, width, dtype=torch.bool)
        self.may_improve = torch.ones(1, 1, dtype=torch.bool)

    def advance(self, ranked: Ranked) -> bool:
        """The same calls as in `_beam_search`. Returns whether the search is over."""
        nodes = ranked.nodes[None, :, None]
        self.nodes, self.scores, _, self.is_finished = GenerationMixin._update_finished_beams(
            GenerationMixin,
            sequences=self.nodes,
            topk_running_sequences=nodes,
            beam_scores=self.scores,
            topk_log_probs=ranked.log_probs[None],
            beam_indices=self.nodes,
            topk_running_beam_indices=nodes,
            is_early_stop_heuristic_unsatisfied=self.may_improve,
            is_sent_finished=self.is_finished,
            next_token_hits_stopping_criteria=ranked.stops[None],
            top_num_beam_mask=torch.arange(2 * self.width) < self.width,
            num_beams=self.width,
            cur_len=PROMPT_LENGTH + self.length,
            decoder_prompt_len=PROMPT_LENGTH,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )
        self.length += 1
        _, running_scores, _ = GenerationMixin._get_running_beams_for_next_iteration(
            GenerationMixin, ranked.log_probs[None], nodes, nodes, ranked.stops[None], self.width
        )
        self.may_improve = GenerationMixin._check_early_stop_heuristic(
            is_early_stop_heuristic_unsatisfied=self.may_improve,
            running_beam_scores=running_scores,
            beam_scores=self.scores,
            is_sent_finished=self.is_finished,
            cur_len=PROMPT_LENGTH + self.length,
            max_length=PROMPT_LENGTH + MAX_LENGTH,
            decoder_prompt_len=PROMPT_LENGTH,
            early_stopping=self.early_stopping,
            length_penalty=self.length_penalty,
        )
        return not GenerationMixin._beam_search_has_unfinished_sequences(
            self.may_improve, self.is_finished, ranked.stops[None], self.early_stopping
        )

    def best_first(self) -> list[tuple[int, float]]:
        finished = self.is_finished[0]
        return [*zip(self.nodes[0, finished, 0].tolist(), self.scores[0, finished].tolist(), strict=True)]


def search_together(width: int, length_penalty: float, early_stopping: EarlyStopping, seed: int) -> tuple[int, int]:
    """Compare both pools after every step. Returns the length of the search and how many were outdone."""
    theirs = TransformersPool(width, length_penalty, early_stopping)
    ours = HfSearchPool(width, length_penalty, MAX_LENGTH, early_stopping)
    outdone = 0
    for length, ranked in enumerate(random_search(width, seed), start=1):
        held = {*ours.best(width).leaves.tolist()}
        offered = [*zip(*(field.tolist() for field in ranked), strict=True)][:width]
        sums, nodes = [total for total, stops, _ in offered if stops], [node for _, stops, node in offered if stops]
        dropped = ours.add(EndedSearchHypotheses.of(sums, [TOKEN] * len(sums), nodes, [0] * len(sums)), length)
        held = held.union(nodes).difference(dropped.tolist())
        outdone += len(dropped)
        is_over = theirs.advance(ranked)
        found = ours.best(width)
        assert [*zip(found.leaves.tolist(), found.scores.tolist(), strict=True)] == theirs.best_first()
        assert {*found.leaves.tolist()} == held
        if length == MAX_LENGTH:
            assert is_over
            return length, outdone
        running = ranked.log_probs[~ranked.stops]
        assert ours.is_done(float(running[0]), length) == is_over
        if is_over:
            return length, outdone
    raise AssertionError("the search has no end")


@pytest.mark.parametrize("length_penalty", PENALTIES)
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_pool_and_end_are_those_of_transformers(early_stopping: EarlyStopping, length_penalty: float) -> None:
    searches = [search_together(1 + seed % 8, length_penalty, early_stopping, seed) for seed in range(SEARCHES)]
    lengths, outdone = zip(*searches, strict=True)
    assert min(lengths) < MAX_LENGTH == max(lengths), "searches must end in either way"
    assert sum(outdone) > SEARCHES // 10, "pools must overflow"


def hf_pool(width: int, length_penalty: float, early_stopping: EarlyStopping = False) -> SearchHypothesisPool:
    return HfSearchPool(width, length_penalty, MAX_LENGTH, early_stopping)


def exact_hf_pool(width: int, length_penalty: float) -> SearchHypothesisPool:
    return hf_pool(width, length_penalty, "never")


def vllm_pool(width: int, length_penalty: float) -> SearchHypothesisPool:
    return VllmSearchPool(width, length_penalty, MAX_LENGTH, PROMPT_LENGTH, frozenset({EOS}))


PoolOf = Callable[..., SearchHypothesisPool]
every_kind = pytest.mark.parametrize("new_pool", [hf_pool, vllm_pool])


@pytest.mark.parametrize("new_pool", [exact_hf_pool, vllm_pool])
@settings(max_examples=70, derandomize=True)
@given(
    seed=st.integers(0, 1 << 32),
    width=st.integers(1, 4),
    length_penalty=st.one_of(st.sampled_from(PENALTIES), st.floats(-3, 3)),
    loss=st.sampled_from([0.0, 0.01, 0.3, 3.0]),
)
def test_nothing_that_runs_on_enters_a_settled_pool(
    new_pool: PoolOf, seed: int, width: int, length_penalty: float, loss: float
) -> None:
    choose = random.Random(seed)
    pool = new_pool(width, length_penalty)
    for node in range(width):
        offer(pool, -choose.uniform(0, 9), choose.randint(1, MAX_LENGTH), choose.choice([EOS, TOKEN]), node)
    held = pool.best(width)
    length = choose.randint(1, MAX_LENGTH - 1)
    best_running = -choose.uniform(0, 30)
    if not pool.is_done(best_running, length):
        return
    score = best_running - loss * choose.random()
    for ends_at in range(length + 1, MAX_LENGTH + 1):
        score -= loss * choose.random()
        tokens = [EOS, TOKEN] if ends_at == MAX_LENGTH else [EOS]
        outdone = pool.add(EndedSearchHypotheses.of([score] * len(tokens), tokens, tokens, [0] * len(tokens)), ends_at)
        assert {*outdone.tolist()} == {*tokens}
    assert all(map(np.array_equal, pool.best(width), held))


@pytest.mark.parametrize("last_token", [EOS, TOKEN])
def test_score_of_transformers_counts_every_generated_token(last_token: int) -> None:
    pool = hf_pool(3, 2.0)
    offer(pool, -8.0, 4, last_token, 0)
    assert [field.tolist() for field in pool.best(1)] == [[-0.5], [0]]


def pool_of(
    scores: list[float], new_pool: Callable[..., SearchHypothesisPool] = hf_pool, **options: object
) -> SearchHypothesisPool:
    """Room for three; node i has the score `scores[i]` at length 1."""
    pool = new_pool(3, options.pop("length_penalty", 0.0), **options)
    for node, score in enumerate(scores):
        assert offer(pool, score, 1, TOKEN, node) is None
    return pool


@every_kind
def test_best_hypotheses_come_first(new_pool: PoolOf) -> None:
    assert pool_of([-2.0, -1.0, -3.0], new_pool).best(2).leaves.tolist() == [1, 0]


@every_kind
def test_full_pool_gives_up_its_worst(new_pool: PoolOf) -> None:
    pool = pool_of([-2.0, -3.0, -1.0], new_pool)
    assert offer(pool, -2.5, 1, TOKEN, 3) == 1
    assert pool.best(3).leaves.tolist() == [2, 0, 3]


@every_kind
def test_newcomer_worse_than_a_full_pool_is_given_up(new_pool: PoolOf) -> None:
    assert offer(pool_of([-2.0, -3.0, -1.0], new_pool), -4.0, 1, TOKEN, 3) == 3


@every_kind
def test_tie_goes_to_the_earlier_hypothesis(new_pool: PoolOf) -> None:
    pool = pool_of([-1.0, -1.0, -1.0], new_pool)
    assert offer(pool, -1.0, 1, TOKEN, 3) == 3
    assert pool.best(3).leaves.tolist() == [0, 1, 2]


def test_beams_compete_with_what_is_finished_if_the_search_ends_here() -> None:
    pool = pool_of([-2.0, -1.0, -3.0])
    running = EndedSearchHypotheses.of([-1.0, -np.inf, -2.5, -0.5], [TOKEN] * 4, [10, 11, 12, 13], [0, 1, 2, 3])
    assert pool.best_so_far(5, running, 1).leaves.tolist() == [13, 1, 10, 0, 12]
    assert pool.best(5).leaves.tolist() == [1, 0, 2]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_pool_with_room_is_never_settled(early_stopping: EarlyStopping) -> None:
    assert not pool_of([-1.0, -2.0], early_stopping=early_stopping).is_done(-1000.0, 9)
    assert not pool_of([-1.0, -2.0], vllm_pool).is_done(-1000.0, 9)


@pytest.mark.parametrize(("early_stopping", "settled"), [(False, False), (True, True), ("never", False)])
def test_only_early_stopping_ignores_a_better_running_beam(early_stopping: EarlyStopping, settled: bool) -> None:
    assert pool_of([-1.0, -2.0, -3.0], early_stopping=early_stopping).is_done(-2.5, 9) == settled


@every_kind
def test_running_beam_that_equals_the_worst_cannot_enter(new_pool: PoolOf) -> None:
    assert pool_of([-1.0, -2.0, -3.0], new_pool).is_done(-3.0, 9)


@pytest.mark.parametrize(("early_stopping", "settled"), [(False, True), ("never", False)])
def test_never_judges_by_the_longest_possible(early_stopping: EarlyStopping, settled: bool) -> None:
    pool = pool_of([-1.0, -1.0, -1.0], early_stopping=early_stopping, length_penalty=1.0)
    assert pool.is_done(-10.0, 9) == settled
    assert pool.is_done(-1.0 * MAX_LENGTH, 9)
