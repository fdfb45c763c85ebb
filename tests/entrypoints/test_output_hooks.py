"""What stands outside of the core takes part in engines where a request asks for it, and in no others."""

from __future__ import annotations

import subprocess
import sys
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

from vllm_trie import beam_params
from vllm_trie.entrypoints import llm_engine_step, output_hooks
from vllm_trie.entrypoints.output_hooks import COMPLETE, OFFLINE, ONLINE, OfflineHook, OnlineHook

OUTSIDE = "step_search", "reranking", "batch", "trace", "mend"
STEPS, RERANKED = beam_params(2, unit="step", step_stop=["."], scorer="prm"), beam_params(2, rerank="mbr")


class AnEngine:
    vllm_config = None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(output_hooks, "has_beams", lambda _: True)
    return AnEngine()


def test_what_the_tables_name_is_there() -> None:
    for hooks, kind in ((OFFLINE, OfflineHook), (ONLINE, OnlineHook)):
        for place in hooks._classes.values():
            assert issubclass(resolve_name(place), kind)
    assert all(callable(resolve_name(place)) for place in COMPLETE.values())


@pytest.mark.parametrize(
    "params", [SamplingParams(), beam_params(2, trace=True), SamplingParams(extra_args={"unit": "step"}), None], ids=str
)
def test_other_requests_bring_no_hook(engine: Any, params: Any) -> None:
    assert OFFLINE.of_request(engine, params) is None
    assert ONLINE.of_request(engine, params) is None
    assert engine not in OFFLINE
    assert engine not in ONLINE


def test_an_engine_has_one_hook_of_a_kind(engine: Any) -> None:
    steps = OFFLINE.of_request(engine, STEPS)
    assert steps is OFFLINE.of_request(engine, STEPS)
    assert {*OFFLINE[engine]} == {"step_search"}
    assert OFFLINE.of_request(engine, RERANKED) is not steps
    assert [*OFFLINE[engine]] == ["reranking", "step_search"], "as an interrupted metric should find no new candidates"
    assert OFFLINE.of_request(engine, STEPS) is steps
    assert ONLINE.of_request(engine, RERANKED) is None
    assert OFFLINE.of_request(AnEngine(), STEPS) is not steps


def test_an_engine_without_beams_has_none(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_hooks, "has_beams", lambda _: False)
    assert OFFLINE.of_request(engine, STEPS) is None


def test_a_step_asks_hooks_that_wait_for_something_alone(engine: Any) -> None:
    hook: Any = SimpleNamespace(waiting={}, take=lambda engine, outputs: [*outputs, "more"])
    OFFLINE[engine] = {"a kind": hook}
    step = llm_engine_step.llm_engine_step.function
    assert step(lambda self: ["output"], engine) == ["output"]
    hook.waiting["request"] = None
    assert step(lambda self: ["output"], engine) == ["output", "more"]


@pytest.mark.nightly
@pytest.mark.slow
def test_the_front_end_loads_none_of_it() -> None:
    names = [f"vllm_trie.{name}" for name in OUTSIDE]
    script = f"""
import sys
from vllm_trie import plugin
plugin.register(); plugin._wrap_plugin_front_end(None, keeps_stats=True)
print([name for name in sys.modules if name.startswith({tuple(names)})])
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1:] == ["[]"], result.stderr[-2000:]
