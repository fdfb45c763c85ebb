"""With a draft model on the V2 runner beams are plain, and ordinary requests beside them speculate."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Engines
from tests.models import make_draft
from tests.v2.test_parity import LIMITS, MODES, answers, check_answers


@MODES
def test_beams_are_plain_and_right(
    engines: Engines,
    random_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    is_async: bool,
) -> None:
    model = random_model("gqa")
    draft = make_draft(model, tmp_path_factory.mktemp("draft"), 0.3, seed=1)
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    logged: list[str] = []
    monkeypatch.setattr(logging.getLogger("vllm.trie_beam"), "info", logged.append)
    engine = engines(
        model, **LIMITS, async_scheduling=is_async, speculative_config=speculative, disable_log_stats=False
    )
    assert sum("Beams do not speculate on Model Runner V2" in line for line in logged) == 1
    check_answers(answers(engine), model)
    accepted = sum(m.value for m in engine.llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")
    assert accepted > 0, "ordinary requests do not speculate"
