"""What takes rows away from searches: preemption, resets of the prefix cache, aborts."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from tests.support.engine import Engine


def preempt_all(engine: Engine) -> None:
    """As vLLM does it when blocks run out: last come, first preempted."""
    while engine.scheduler.running:
        engine.scheduler._preempt_request(engine.scheduler.running.pop(), time.monotonic())


def pending(engine: Engine) -> int:
    """Steps on their way, of the search that has most of them."""
    return max((group.num_pending for group in engine.scheduler.groups.values()), default=0)


class Clumsy:
    """Preempts everything as soon as any search has taken a step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_preempted = self.num_steps = self.most_pending = 0
        self._seen: dict[str, int] = {}

    def preempt_whenever_a_search_is_further(self) -> None:
        self.num_steps += 1
        lengths = {group_id: group.length for group_id, group in self.engine.scheduler.groups.items()}
        if any(length > self._seen.get(group_id, 0) for group_id, length in lengths.items()):
            self.most_pending = max(self.most_pending, pending(self.engine))
            preempt_all(self.engine)
            self._seen.update(lengths)
            self.num_preempted += 1


class Unlucky:
    """Now and then preempts what came last, if something else runs.

    Args:
        share: Of steps, in which that happens.
    """

    def __init__(self, engine: Engine, share: float) -> None:
        self.engine, self.share, self.num_preempted = engine, share, 0
        self._random = random.Random(0)

    def preempt_the_last(self) -> None:
        running = self.engine.scheduler.running
        if len(running) > 1 and self._random.random() < self.share:
            self.engine.scheduler._preempt_request(running.pop(), time.monotonic())
            self.num_preempted += 1


class AbortWithin:
    """Aborts a request between execution and results of a step of the engine, counted from now on."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, request_id: str, step: int) -> None:
        self.num_steps = 0
        update = engine.scheduler.update_from_output

        def aborting(*args: Any) -> Any:
            self.num_steps += 1
            if self.num_steps == step:
                engine.llm.llm_engine.abort_request([request_id])
            return update(*args)

        monkeypatch.setattr(engine.scheduler, "update_from_output", aborting)
