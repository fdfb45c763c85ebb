"""What is known of a batch is worked out once, and again where its groups, or where they are, change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.launch_counter import LaunchCounter
from benchmarks.weightless import CATALOG, PROMPT, WeightlessStep, kernels_noted
from tests.support.steps import rules_of
from vllm_trie.search.constraints.catalog import ItemConstraint

WIDTH, VOCAB_SIZE = 3, 64
MOST_CHILDREN = 4096, 200, 9, 5000, 9, 300  # by depth: each for another kernel, or another variant, than the one before


@pytest.fixture
def step() -> Iterator[WeightlessStep]:
    with kernels_noted(), LaunchCounter():
        yield WeightlessStep(rules_of(WIDTH), 2, VOCAB_SIZE)


def test_the_next_batch_of_the_same_rows_needs_no_new_plan(step: WeightlessStep) -> None:
    plans = []
    for length in (25, 26, 27):
        num_tokens = np.full(2, length)
        step.sample(num_tokens)
        plans.append(step.selector.plan(step.context, step.batch(num_tokens)))
        (cohort,) = plans[-1].cohorts
        assert plans[-1].rows.num_tokens(cohort.places).tolist() == [[length] * WIDTH] * 2
    assert plans[0] is plans[1] is plans[2]


@pytest.mark.parametrize("change", ["rules", "a group leaves", "a group is another", "rows elsewhere", "forgotten"])
def test_another_batch_needs_a_plan_of_its_own(step: WeightlessStep, change: str) -> None:
    batch = step.batch(np.full(2, 25))
    before, name = step.selector.plan(step.context, batch), "1"
    of_group = step.groups[name]
    if change == "rules":
        of_group.rules = of_group.rules._replace(is_last=True)
    elif change == "a group leaves":
        del step.context.steps[name]
    elif change == "a group is another":
        step.groups[name] = replace(of_group)
    elif change == "rows elsewhere":
        batch = replace(batch, idx_mapping_np=batch.idx_mapping_np[::-1])
    else:
        step.selector.forget()
    after = step.selector.plan(step.context, batch)
    assert after is not before
    assert len(after.cohorts) == (2 if change == "rules" else 1)
    if change == "rows elsewhere":
        assert not np.array_equal(after.cohorts[0].places, before.cohorts[0].places)


def test_along_a_catalog_each_depth_is_taken_by_kernels_for_its_children() -> None:
    """However many plans a search has needed before, and those that it needs again are not made again."""
    rules = rules_of(WIDTH, constraints=(ItemConstraint(CATALOG),))
    with kernels_noted() as noted, LaunchCounter():
        step = WeightlessStep(rules, 1, VOCAB_SIZE, most_children=MOST_CHILDREN)
        taken = list[tuple[int, int]]()
        for length in range(len(MOST_CHILDREN)):
            for kernel in noted.values():
                kernel.count = 0
            step.sample(np.array([len(PROMPT) + length]))
            taken.append((noted["_rank_items_kernel"].count, noted["_rank_item_tiles_kernel"].count))
        (cohort,) = step.selector.plan(step.context, step.batch(np.array([len(PROMPT)]))).cohorts
    assert taken == [(1, 0), (1, 0), (1, 0), (0, 1), (1, 0), (1, 0)]
    assert [sizes.most_children for sizes in cohort.plans] == [4096, 256, 16, 5000]
    assert all(logits.values.numel() == 0 for logits, _ in cohort.plans.values()), "they keep a step's logits"
