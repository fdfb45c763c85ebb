"""Looking into an engine of this process: blocks in use, the time of its parts, and what searches counted."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any, NamedTuple
from unittest import mock

from vllm_trie.engine.stats import GroupCounts
from vllm_trie.speculation.search.rejection import DraftAcceptanceRules


class Steps(NamedTuple):
    """What one request held in each of its steps, while the model computed it."""

    used: list[int]  # KV blocks of the pool in use
    live: list[int]  # of beam groups: those that rows lead to
    path: list[int]  # of beam groups: those that one row leads to, in all KV cache groups


def core_of(llm: Any) -> Any:
    """vLLM's EngineCore."""
    return llm.llm_engine.engine_core.engine_core


def manager_of(llm: Any) -> Any:
    """The KV cache manager."""
    return core_of(llm).scheduler.kv_cache_manager


def runner_of(llm: Any) -> Any:
    """The model runner of an engine that has one alone."""
    return core_of(llm).model_executor.driver_worker.worker.model_runner


def has_window(llm: Any) -> bool:
    """Whether KV blocks leave a window that attention sees."""
    groups = manager_of(llm).kv_cache_config.kv_cache_groups
    return any(getattr(group.kv_cache_spec, "sliding_window", None) for group in groups)


def total_counts(outputs: Sequence[Any]) -> GroupCounts:
    """What several speculative searches took together."""
    total = GroupCounts()
    for output in outputs:
        counts = output.kv_transfer_params["trie_beam"]
        total.add(GroupCounts(**{count.name: counts[count.name] for count in fields(GroupCounts)}))
    return total


class Layers:
    """Layers of sampled drafts that were verified, and those that were accepted as they were drafted."""

    def __init__(self) -> None:
        self.num_verified = self.num_accepted = 0

    def add(self, other: Layers) -> None:
        """Include those of another search."""
        self.num_verified += other.num_verified
        self.num_accepted += other.num_accepted

    @property
    def acceptance(self) -> float:
        """The share that was accepted; 0 where none was verified."""
        return self.num_accepted / max(self.num_verified, 1)


@contextmanager
def verified_layers() -> Iterator[Layers]:
    """Count the layers that engines of this process verify."""
    layers, verify = Layers(), DraftAcceptanceRules.verify

    def counted(*args: Any) -> Any:
        verified = verify(*args)
        layers.num_verified += 1
        layers.num_accepted += verified.is_complete
        return verified

    with mock.patch.object(DraftAcceptanceRules, "verify", counted):
        yield layers


def same_answers(outputs: Sequence[Any], plain: Sequence[Any], dtype: str) -> str:
    """How many best answers are those of plain beams, as tables show it.

    In half precision a token that is verified in another batch may be rounded otherwise, which changes answers.

    Raises:
        AssertionError: one differs in float32.
    """
    pairs = zip(outputs, plain, strict=True)
    same = sum(ours.outputs[0].token_ids == theirs.outputs[0].token_ids for ours, theirs in pairs)
    assert same == len(plain) or dtype != "float32", "speculation answered differently"
    return f"{same} of {len(plain)}"


@contextmanager
def reclaiming_every(llm: Any, interval: int) -> Iterator[None]:
    """Give dead blocks back every `interval` steps."""
    manager = manager_of(llm)
    before, manager.reclaim_interval = manager.reclaim_interval, interval
    try:
        yield
    finally:
        manager.reclaim_interval = before


def watched(llm: Any, prompt: list[int], params: Any, num_rows: int) -> Steps:
    """Run one request by itself, and count blocks in every step, when all are taken that it needs.

    Args:
        num_rows: Beams or samples.

    Raises:
        RuntimeError: the pool was so full that some of them may have waited.
    """
    manager, scheduler = manager_of(llm), core_of(llm).scheduler
    pool, num_usable = manager.block_pool, manager.num_usable_blocks
    assert pool.get_num_free_blocks() == num_usable, "another request holds blocks"
    steps = Steps([], [], [])

    def counted(*args: Any, **kwargs: Any) -> Any:
        scheduled = type(scheduler).schedule(scheduler, *args, **kwargs)  # whose class changes as groups come and go
        if scheduled.total_num_scheduled_tokens:
            steps.used.append(num_usable - pool.get_num_free_blocks())
            steps.live.append(sum(trie.num_live_blocks for group in manager._groups.values() for trie in group.tries))
            tries = (trie for group in manager._groups.values() for trie in group.tries)
            steps.path.append(sum(len(trie.row_blocks(0)) for trie in tries))
        return scheduled

    llm.llm_engine.add_request("watched", {"prompt_token_ids": prompt}, params)
    with mock.patch.object(scheduler, "schedule", counted):
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
    if manager.num_usable_blocks - max(steps.used) < num_rows:
        raise RuntimeError(f"{manager.num_usable_blocks} KV blocks are too few to count on; --kv-cache-gib gives more")
    return steps


class Clock:
    """Adds up the time spent in each part, step by step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def begin_step(self) -> None:
        self.steps.append(defaultdict(float))

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.steps[-1][part] += time.perf_counter() - start

        return clocked

    def ms(self, part: str) -> list[float]:
        """Milliseconds of one part, by step."""
        return [1000 * step[part] for step in self.steps]

    def median_ms(self, part: str) -> float:
        return statistics.median(self.ms(part))


@contextmanager
def clocked(llm: Any, parts: dict[str, tuple[Any, str]]) -> Iterator[Clock]:
    """Time every step of an engine as "whole step", and parts of it.

    Args:
        parts: What to time by name: whose attribute, and which.
    """
    core, clock = core_of(llm), Clock()
    clock.begin_step()
    step = core.step_fn

    def clocked_step() -> Any:
        clock.begin_step()
        return clock.around("whole step", step)()

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(core, "step_fn", clocked_step))
        for part, (owner, name) in parts.items():
            around = clock.around(part, getattr(owner, name))
            patched.enter_context(mock.patch.object(owner, name, around))
        yield clock
