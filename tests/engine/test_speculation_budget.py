"""A group whose drafts lead nowhere rests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_trie import BeamParams
from vllm_trie.engine.group_forests import GroupForests
from vllm_trie.engine.speculation_budget import SpeculationBudgets
from vllm_trie.messages import Drafted


def test_after_drafts_that_led_nowhere_a_group_rests_longer_each_time_until_some_lead_on() -> None:
    config: Any = SimpleNamespace(
        num_speculative_tokens=3,
        draft_model_config=SimpleNamespace(max_model_len=64),
        target_model_config=SimpleNamespace(max_model_len=64),
        use_ngram=lambda: True,
    )
    budgets, rests = SpeculationBudgets(config, None), list[int]()
    forests = GroupForests(BeamParams(beam_width=2, speculation="exact"), 2)
    for num_steps in [1] * 9 + [2, 1, 1, 1]:
        budgets.learn(forests, 10, Drafted(4, 2, 4, 0.0, []), num_steps)
        rests.append(forests.num_rested)
    assert rests == [0, 0, 1, 2, 4, 8, 16, 16, 16, 0, 0, 0, 1]
