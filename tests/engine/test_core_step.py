"""vLLM's engine does not sleep between the steps of a search that waits for its results; otherwise it sleeps as before.

vLLM's loop runs with a scheduler and an executor that compute nothing.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from contextlib import nullcontext
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import core
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

from vllm_trie.compat.patch import wrap_vllm
from vllm_trie.supported_engines import ASYNC_SCHEDULER

NUM_STEPS = 20


class OneSearch:
    """A scheduler whose only request takes one step at a time, or none as long as it is `loading`."""

    def __init__(self, groups: dict[str, object], loading: int = 0) -> None:
        self.groups, self.loading = groups, loading
        self.num_left, self.is_pending = NUM_STEPS, False

    def has_requests(self) -> bool:
        return self.num_left > 0

    def schedule(self, throttle_prefills: bool) -> SimpleNamespace:
        is_scheduled = not (self.is_pending or self.loading)
        self.loading = max(self.loading - 1, 0)
        self.is_pending |= is_scheduled
        return SimpleNamespace(total_num_scheduled_tokens=int(is_scheduled), pending_structured_output_tokens=False)

    def get_grammar_bitmask(self, output: SimpleNamespace) -> None:
        return None

    def update_from_output(self, output: SimpleNamespace, result: object) -> dict[int, Any]:
        self.num_left -= output.total_num_scheduled_tokens
        self.is_pending &= not output.total_num_scheduled_tokens
        return {}


def done(result: object) -> Future[object]:
    future = Future[object]()
    future.set_result(result)
    return future


def num_sleeps(
    scheduler: OneSearch,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[EngineCoreProc] = EngineCoreProc,
    is_async: bool = True,
    scheduler_cls: str | None = ASYNC_SCHEDULER,
) -> int:
    sleeps = list[float]()
    monkeypatch.setattr(core.time, "sleep", sleeps.append)
    wrap_vllm("vllm_trie.engine.core_step")
    engine = object.__new__(kind)
    vars(engine).update(
        scheduler=scheduler,
        vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=scheduler_cls)),
        batch_queue=deque(maxlen=2),
        batch_queue_size=2,
        async_scheduling=is_async,
        is_mm_encoder_only=False,
        is_pooling_model=False,
        model_executor=SimpleNamespace(
            execute_model=lambda *_, **__: done({}), sample_tokens=lambda *_, **__: done({})
        ),
        output_queue=Queue(),
        step_fn=engine.step_with_batch_queue,
        **dict.fromkeys(("log_error_detail", "capture_iteration_details"), lambda _: nullcontext()),
        **dict.fromkeys(
            ("_process_aborts_queue", "_attach_iteration_details", "_attach_weight_version", "post_step"),
            lambda *_: None,
        ),
        _should_throttle_prefills=lambda: False,
    )
    while scheduler.has_requests():
        EngineCoreProc._process_engine_step(engine)
    return len(sleeps)


def test_an_engine_does_not_sleep_while_a_search_waits_for_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_sleeps(OneSearch({"search": object()}), monkeypatch) == 0


@pytest.mark.parametrize("what", ["no search", "data parallel", "no async scheduling"])
def test_an_engine_sleeps_as_before_with(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = OneSearch({} if what == "no search" else {"search": object()})
    kind = DPEngineCoreProc if what == "data parallel" else EngineCoreProc
    is_async = what != "no async scheduling"
    assert num_sleeps(scheduler, monkeypatch, kind, is_async) == NUM_STEPS - 1


def test_an_engine_sleeps_while_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = OneSearch({"search": object()}, loading=10)
    assert num_sleeps(scheduler, monkeypatch) == 10


def test_an_engine_without_beams_in_the_same_process_sleeps_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = OneSearch({})
    del scheduler.groups
    assert num_sleeps(scheduler, monkeypatch, scheduler_cls=None) == NUM_STEPS - 1
