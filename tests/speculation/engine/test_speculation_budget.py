"""A group whose drafts lead nowhere rests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.test_new_group import group_of as beam_group_of
from vllm_trie import BeamParams
from vllm_trie.engine.speculation import DraftingCandidate
from vllm_trie.messages import CANNOT_DRAFT, MOST_DRAFTS, DraftedMessage, GroupStep
from vllm_trie.search.rules import SearchPhase
from vllm_trie.speculation.engine.group_forests import GroupForests
from vllm_trie.speculation.engine.speculation_budget import SpeculationBudgets


def budgets_of(by_ngrams: bool) -> SpeculationBudgets:
    config: Any = SimpleNamespace(
        num_speculative_tokens=3,
        draft_model_config=SimpleNamespace(max_model_len=64),
        target_model_config=SimpleNamespace(max_model_len=64),
        use_ngram=lambda: by_ngrams,
    )
    return SpeculationBudgets(config, None)


def group_of(speculation: str) -> Any:
    return SimpleNamespace(length=10, forests=GroupForests(BeamParams(beam_width=2, speculation=speculation), 2))


@pytest.mark.parametrize("speculation", ["exact", "auto"])
def test_where_attention_takes_no_trees_a_search_takes_plain_steps(speculation: str) -> None:
    group = group_of(speculation)
    budgets_of(False).learn(group, CANNOT_DRAFT, 1)
    assert group.forests.first_length > 100


def test_after_drafts_that_led_nowhere_a_group_rests_longer_each_time_until_some_lead_on() -> None:
    budgets, group, rests = budgets_of(True), group_of("exact"), list[int]()
    for num_steps in [1] * 9 + [2, 1, 1, 1]:
        budgets.learn(group, DraftedMessage(4, 2, 4, 0.0, []), num_steps)
        rests.append(group.forests.num_rested)
    assert rests == [0, 0, 1, 2, 4, 8, 16, 16, 16, 0, 0, 0, 1]


@pytest.mark.parametrize("speculation", ["exact", "auto"])
def test_a_layer_has_no_more_drafts_than_a_forest(speculation: str) -> None:
    """However many are asked for: as many tokens are ranked after each node."""
    forests = GroupForests(BeamParams(beam_width=2, speculation=speculation, draft_width=150_000), 2)
    assert forests.draft_width == forests.most_drafts == MOST_DRAFTS


@pytest.mark.parametrize("speculation", ["exact", "auto"])
def test_beyond_the_length_that_the_draft_model_takes_no_step_waits_for_the_one_before(speculation: str) -> None:
    group, budgets = beam_group_of({"speculation": speculation}), budgets_of(False)
    group.forests = budgets.forests(group.plan.params, group.plan.width)
    group.length = 1
    request: Any = SimpleNamespace(num_computed_tokens=64)
    output: Any = SimpleNamespace(scheduled_spec_decode_tokens={}, num_scheduled_tokens={})
    step = GroupStep(SearchPhase(), selects=True)
    budgets.share_out([DraftingCandidate(group, request, step)], output, 4, 99, 0)
    group.num_pending = 1
    assert step.budget is None
    assert not group.waits
