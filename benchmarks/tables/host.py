"""Where the time of one step of beam search goes, part by part."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from benchmarks.common import generate
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.watch import clocked, runner_of
from vllm_trie import beam_params

PARTS = ("whole step", "schedule", "expand", "forward", "select", "fork", "replay", "outputs")


def ms_by_part(llm: Any, search: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Milliseconds of the host per decoding step of each part, medians over searches of their means over steps.

    `select` without `fork`; `outputs`, which happen once, are shared out over the steps. What a GPU computes continues
    after the host has launched it.
    """
    runner = runner_of(llm)
    selector, scheduler = type(runner.selector), resolve_name("vllm_trie.engine.scheduler:BeamScheduler")
    parts = {
        "schedule": (scheduler, "schedule"),
        "expand": (resolve_name("vllm_trie.worker.runner"), "expand"),
        "forward": (runner.model, "forward"),
        "select": (selector, "select"),
        "fork": (type(runner.rows), "fork"),
        "replay": (scheduler, "_replay"),
        "outputs": (scheduler, "_end_group"),
    }
    by_part: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(repeats):
        with clocked(llm, parts) as clock:
            search()
        decoding = [step for step in clock.steps if step["select"]][1:]  # the first one computes the prompts
        for step in decoding:
            step["select"] -= step["fork"]
        for part, seconds in by_part.items():
            counted = clock.steps if part == "outputs" else decoding
            seconds.append(sum(step[part] for step in counted) / len(decoding))
    return {part: 1000 * statistics.median(seconds) for part, seconds in by_part.items()}


def cells(setting: Setting) -> list[Cell]:
    return setting.pick([(4, 2)], [(8, 8), (128, 1)], [(8, 8), (32, 8), (128, 1)])


def measure(bench: Bench, width: int, groups: int) -> Measured:
    """Several searches at once."""
    llm = bench.engine()
    prompts = [{"prompt_token_ids": prompt} for prompt in bench.prompts(groups)]
    params = beam_params(width, max_tokens=bench.setting.pick(4, 64, 64), ignore_eos=True)

    def search() -> None:
        generate(llm, prompts, params)

    search()
    return Measured([(f"{width} x {groups}", *ms_by_part(llm, search, bench.setting.pick(1, 3, 7)).values())])


TABLE = Table(
    "Where a step's time goes, ms",
    ("beams x groups", *PARTS),
    cells,
    measure,
    "of a decoding step, clocks running; select without fork; outputs: made once, shared out over the steps",
)
