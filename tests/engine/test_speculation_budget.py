"""A group whose drafts lead nowhere rests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_trie import BeamParams
from vllm_trie.engine.group_forests import GroupForests
from vllm_trie.engine.speculation_budget import SpeculationBudgets
from vllm_trie.messages import CANNOT_DRAFT, Drafted


def budgets_of(by_ngrams: bool) -> SpeculationBudgets:
    config: Any = SimpleNamespace(
        num_speculative_tokens=3,
        draft_model_config=SimpleNamespace(max_model_len=64),
        target_model_config=SimpleNamespace(max_model_len=64),
        use_ngram=lambda: by_ngrams,
    )
    return SpeculationBudgets(config, None)


@pytest.mark.parametrize("speculation", ["exact", "auto"])
def test_where_attention_takes_no_trees_a_search_takes_plain_steps(speculation: str) -> None:
    forests = GroupForests(BeamParams(beam_width=2, speculation=speculation), 2)
    budgets_of(False).learn(forests, 10, CANNOT_DRAFT, 1)
    assert not any(map(forests.may_grow, range(100)))


def test_after_drafts_that_led_nowhere_a_group_rests_longer_each_time_until_some_lead_on() -> None:
    budgets, rests = budgets_of(True), list[int]()
    forests = GroupForests(BeamParams(beam_width=2, speculation="exact"), 2)
    for num_steps in [1] * 9 + [2, 1, 1, 1]:
        budgets.learn(forests, 10, Drafted(4, 2, 4, 0.0, []), num_steps)
        rests.append(forests.num_rested)
    assert rests == [0, 0, 1, 2, 4, 8, 16, 16, 16, 0, 0, 0, 1]
