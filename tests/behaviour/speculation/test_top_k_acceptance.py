"""Drafts that are accepted by rank, in an engine: more of them, marked as inexact, and greedy search in the limit."""

from __future__ import annotations

import pytest
import torch

from benchmarks.watch import total_counts
from tests.support.engine import Engine
from tests.support.reference import SCORE_TOLERANCE
from tests.support.trained_pair import (
    LENGTH,
    SAMPLED,
    answer,
    counts,
    own_sum,
    rows_of,
    search,
    tokens,
)

pytestmark = pytest.mark.slow

BY_RANK = SAMPLED | {"accept": "top_k"}


@pytest.mark.nightly
def test_more_drafts_are_accepted_and_outputs_say_that_they_are_inexact(
    engine: Engine, prompts: list[list[int]]
) -> None:
    exact, by_rank, by_high_rank = (
        search(engine, prompts, **mode) for mode in (SAMPLED, BY_RANK, BY_RANK | {"accept_top_k": 64})
    )
    assert [counts(output)["is_exact"] for output in by_rank] == [False] * len(prompts)
    assert all("is_exact" not in counts(output) for output in exact)
    per_forward = [total_counts(outputs).steps_per_forward for outputs in (exact, by_high_rank)]
    assert per_forward[0] < per_forward[1]
    assert len({str(tokens(outputs)) for outputs in (exact, by_rank, by_high_rank)}) == 3, "K decides what is accepted"
    assert tokens(search(engine, prompts, **BY_RANK)) == tokens(by_rank), "and the seed what is sampled"


def test_one_beam_by_the_best_continuation_is_greedy_search_as_the_temperature_falls(
    engine: Engine, prompts: list[list[int]]
) -> None:
    sampled = search(engine, prompts, width=1, temperature=0.01, accept_top_k=1, draft_width=2, **BY_RANK)
    assert total_counts(sampled).accepted > LENGTH
    num_best = 0
    for prompt, (generated,) in zip(prompts, tokens(sampled), strict=True):
        rows = rows_of(prompt, generated)
        behind = rows.amax(dim=-1) - rows.gather(1, torch.tensor(generated)[:, None])[:, 0]
        assert behind.max() < 0.1, "what is not the best is as good as that"
        num_best += int((behind == 0).sum())
    assert num_best > 0.95 * LENGTH * len(prompts)


def test_hypotheses_are_reported_by_the_targets_probability(engine: Engine, prompts: list[list[int]]) -> None:
    for prompt, output in zip(prompts, search(engine, prompts, memory_mode=True, **BY_RANK), strict=True):
        for generated, total in answer(output):
            if total is not None:
                assert total == pytest.approx(own_sum(prompt, generated), abs=SCORE_TOLERANCE * len(generated))
