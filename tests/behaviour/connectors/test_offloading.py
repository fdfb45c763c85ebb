"""vLLM's OffloadingConnector: prompts move to the host's memory, and come back when their blocks have others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.support.engine import Engine, Engines
from tests.support.offloading import offloading_config
from tests.support.running import BYTES_PER_BLOCK, count_ties, prompt_of, run
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

LONG = (prompt_of(300, 1), beam_params(3, n=3, max_tokens=3, ignore_eos=True))
WIDE = (prompt_of(40, 2), beam_params(8, n=8, max_tokens=20, ignore_eos=True))
PLAIN = (prompt_of(310, 3), SamplingParams(temperature=0, max_tokens=3))


def worker_of(engine: Engine):
    """What copies blocks in this engine."""
    return engine.runner.kv_connector.kv_connector.connector_worker.worker


@pytest.mark.timeout(300)  # where a search never finds room, the engine steps for ever
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("is_async", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_beams_overwrite_no_block_before_it_is_saved(
    engines: Engines, random_model: Callable[[str], Path], is_async: bool, caching: bool
) -> None:
    """Requests have gone when their blocks are copied, and searches take these blocks."""
    model = random_model("gqa")
    expected = run(engines(model), [LONG, WIDE, PLAIN])
    engine = engines(
        model,
        kv_transfer_config=offloading_config(),
        kv_cache_memory_bytes=16 * BYTES_PER_BLOCK,
        max_model_len=384,
        async_scheduling=is_async,
        enable_prefix_caching=caching,
    )
    for job, other in [(LONG, 0), (WIDE, 1), (PLAIN, 2), (WIDE, 1), (LONG, 0), (PLAIN, 2)]:
        assert count_ties(run(engine, [job]), [expected[other]]) == 0
    assert worker_of(engine).num_waited_for >= 2, "no block was taken early"
    assert count_ties(run(engine, [LONG, WIDE, PLAIN]), expected) == 0
    assert worker_of(engine).num_copied > 4 * 9, "nothing was loaded"
    while engine.scheduler.has_requests():
        engine.llm.llm_engine.step()
