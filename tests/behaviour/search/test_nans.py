"""Logits that are no numbers are counted in a batch with beams as without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.engine import Engines
from tests.support.running import count_ties, prompt_of, run
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

WIDTH, NUM_NANS = 4, 3


def test_nans_are_reported_of_the_request_that_has_them(
    engines: Engines, random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(random_model("gqa"))
    runner, batches, reports = engine.runner, list[Any](), list[dict[str, int]]()
    beams = (prompt_of(20), beam_params(WIDTH, n=WIDTH, max_tokens=9, ignore_eos=True))
    ordinary = (prompt_of(9), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    (expected,) = run(engine, [beams])
    compute_logits, update = runner.model.compute_logits, engine.scheduler.update_from_output

    def sampling(hidden_states: Any, batch: Any, *args: Any) -> Any:
        batches.append(batch)
        return type(runner).sample(runner, hidden_states, batch, *args)

    def spoiled(*args: Any) -> Any:
        logits = compute_logits(*args)
        for place, request_id in enumerate(batches[-1].req_ids):
            if is_ordinary(request_id):
                logits[place, :NUM_NANS] = float("nan")
        return logits

    def is_ordinary(request_id: str) -> bool:
        return request_id.startswith("1")  # the second of the jobs

    def updating(scheduler_output: Any, output: Any) -> Any:
        reports.append(output.num_nans_in_logits)
        return update(scheduler_output, output)

    monkeypatch.setattr(runner.sampler, "compute_nans", True)
    monkeypatch.setattr(runner, "sample", sampling)
    monkeypatch.setattr(runner.model, "compute_logits", spoiled)
    monkeypatch.setattr(engine.scheduler, "update_from_output", updating)
    found, _ = run(engine, [beams, ordinary])
    assert count_ties([found], [expected]) == 0
    together = [report for report in reports if report and len(report) == WIDTH + 1]
    assert len(together) >= 7
    for report in together:
        assert {name: count for name, count in report.items() if count} == {
            name: NUM_NANS for name in report if is_ordinary(name)
        }
        assert sum(map(is_ordinary, report)) == 1
