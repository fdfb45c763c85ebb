"""On a build of vLLM that differs from the recorded one, the scheduler checks the first steps of groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.support.engine import Engines
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

NUM_CHECKED = 3


def test_first_steps_of_groups_are_checked_on_a_build_that_differs(
    engines: Engines, random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(
        "vllm_trie.engine.scheduler.vllm_steps_to_check", lambda option: asked.append(option) or NUM_CHECKED
    )
    config = {"trie_beam": {"vllm_check": "warn", "reclaim_interval": 13}}
    engine = engines(random_model("gqa"), additional_config=config)
    assert asked == ["warn"]
    checks: list[int] = []
    stock = engine.scheduler.check_invariants
    monkeypatch.setattr(
        engine.scheduler, "check_invariants", lambda: checks.append(len(engine.scheduler.groups)) or stock()
    )

    def search(num_tokens: int) -> int:
        """Returns how often invariants were checked while there was a group."""
        checks.clear()
        engine.generate([[1, 2, 3]], beam_params(2, n=2, max_tokens=num_tokens, ignore_eos=True))
        return sum(map(bool, checks))

    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=NUM_CHECKED + 2, ignore_eos=True))  # does not count
    assert search(2) > 0
    assert search(NUM_CHECKED + 5) > 0
    assert search(NUM_CHECKED) == 0
