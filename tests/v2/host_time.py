"""What the plugin adds to the host's work of one step on Model Runner V2 with async scheduling, part by part.

    VLLM_USE_V2_MODEL_RUNNER=1 python -m tests.v2.host_time

Runs on a CPU, where Triton's interpreter makes vLLM's own part of a step many times slower than it is: what is
measured is the plugin's share. There is no device here, so `select` and `permute` include what a GPU computes, of
which the host is only to launch it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common import save, show
from benchmarks.stdlib_pair.corpus import held_out_prompts
from benchmarks.watch import Clock
from tests import RUNS_V2
from tests.conftest import TRAINED_TARGET, Engine
from vllm_trie import beam_params
from vllm_trie.engine.async_scheduler import AsyncBeamScheduler
from vllm_trie.engine.scheduler import BeamScheduler
from vllm_trie.worker import v2
from vllm_trie.worker.slots import BeamSlots

PARTS = {
    "schedule": (AsyncBeamScheduler, "schedule"),
    "expand": (BeamSlots, "expand"),
    "select": (v2, "select"),
    "permute": (BeamSlots, "permute"),
    "result": (v2.BeamOutput, "get_output"),
    "replay": (BeamScheduler, "_replay"),
}
COLUMNS = ("beams x groups", *PARTS)
SHAPES = ((4, 1), (8, 4), (64, 1))
TOKENS = 16


def main() -> None:
    if not RUNS_V2:
        sys.exit("set VLLM_USE_V2_MODEL_RUNNER=1: this measures the V2 runner")
    engine = Engine(TRAINED_TARGET, async_scheduling=True, additional_config={"trie_beam": {}})
    note = (
        f"medians of {TOKENS - 2} steps, async scheduling, dtype=float32, Triton's interpreter; select without permute"
    )
    rows = [*by_part(engine)]
    show("Host time per step on the V2 runner, ms", COLUMNS, rows, note)
    save(Path("results"), "async_host", COLUMNS, rows, note)
    engine.close()


def by_part(engine: Engine) -> Iterator[tuple[Any, ...]]:
    """Milliseconds per decoding step, medians, for each of `SHAPES`."""
    for width, groups in SHAPES:
        clock, prompts = Clock(), held_out_prompts(groups)
        with ExitStack() as patches:
            for part, (owner, name) in PARTS.items():
                around = clock.around(part, vars(owner)[name])
                patches.enter_context(mock.patch.object(owner, name, around))
            step = engine.core.step_fn

            def clocked_step(clock: Clock = clock, step: Any = step) -> Any:
                clock.begin_step()
                return step()

            patches.enter_context(mock.patch.object(engine.core, "step_fn", clocked_step))
            params = beam_params(width, max_tokens=TOKENS, ignore_eos=True)
            engine.llm.generate(prompts, params, use_tqdm=False)
        clock.steps = [one for one in clock.steps if one["permute"] and one["replay"]]
        for one in clock.steps:
            one["select"] -= one["permute"]
        yield f"{width} x {groups}", *(clock.median_ms(part) for part in PARTS)


if __name__ == "__main__":
    main()
