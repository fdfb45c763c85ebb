"""Where the host's time goes in one step of beam search, part by part."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.stdlib_pair.corpus import held_out_prompts
from vllm_trie import beam_params
from vllm_trie.engine.scheduler import BeamScheduler
from vllm_trie.patching import Patch
from vllm_trie.worker.rows import BeamRows

PARTS = ("schedule", "expand", "select", "permute", "replay", "forward")
COLUMNS = ("beams x groups", "whole step", *PARTS)
SHAPES = ((8, 8), (128, 1))
TOKENS = 64


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

    def median_ms(self, part: str) -> float:
        return 1000 * statistics.median(step[part] for step in self.steps)


def by_part(llm: Any) -> Iterator[tuple[Any, ...]]:
    """Milliseconds per decoding step, medians; `select` without `permute`.

    Args:
        llm: An engine in this process.
    """
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    for width, groups in SHAPES:
        prompts, params = held_out_prompts(groups), beam_params(width, max_tokens=TOKENS, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
        clock = Clock()
        clock.begin_step()
        parts = [
            (Patch("vllm_trie.engine.scheduler:BeamScheduler", "schedule"), "schedule", BeamScheduler.schedule),
            (Patch("vllm_trie.worker.rows:BeamRows", "expand"), "expand", BeamRows.expand),
            (Patch("vllm_trie.worker.rows:BeamRows", "permute"), "permute", BeamRows.permute),
            (Patch("vllm_trie.engine.scheduler:BeamScheduler", "_replay"), "replay", BeamScheduler._replay),
        ]
        select = Patch("vllm_trie.worker.v1", "select")
        from vllm_trie.worker.select import select as stock_select

        for patch, part, function in parts:
            patch.apply(clock.around(part, function))
        select.apply(clock.around("select", stock_select))
        runner._model_forward = clock.around("forward", runner._model_forward)
        step = core.step

        def clocked_step(step: Callable[[], Any] = step, clock: Clock = clock) -> Any:
            clock.begin_step()
            return clock.around("whole step", step)()

        llm.llm_engine.engine_core.engine_core.step_fn = clocked_step
        try:
            llm.generate(prompts, params, use_tqdm=False)
        finally:
            llm.llm_engine.engine_core.engine_core.step_fn = step
            del runner._model_forward
            for patch in (select, *(patch for patch, _, _ in parts)):
                patch.revert()
        clock.steps = [s for s in clock.steps if s["permute"]]
        for s in clock.steps:
            s["select"] -= s["permute"]
        yield f"{width} x {groups}", clock.median_ms("whole step"), *(clock.median_ms(part) for part in PARTS)
