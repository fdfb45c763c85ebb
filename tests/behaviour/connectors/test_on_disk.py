"""vLLM's example connector, which keeps the KV of prompts on disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig

from tests.support.engine import Engines
from tests.support.memory_connector import forget_memory
from tests.support.running import count_ties, prompt_of, run
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

JOBS = [
    (prompt_of(100, 1), beam_params(6, n=6, max_tokens=40, ignore_eos=True)),
    (prompt_of(64, 2), beam_params(4, n=4, max_tokens=20)),
    (prompt_of(70, 3), SamplingParams(temperature=0, max_tokens=20)),
]


def on_disk(folder: Path) -> KVTransferConfig:
    extra = {"shared_storage_path": str(folder)}
    return KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both", kv_connector_extra_config=extra)


@pytest.mark.parametrize("is_async", [True, False])
def test_what_one_engine_saves_another_loads(
    engines: Engines, random_model: Callable[[str], Path], tmp_path: Path, is_async: bool
) -> None:
    model = random_model("gqa")
    expected = run(engines(model), JOBS)
    options = {"async_scheduling": is_async, "enable_prefix_caching": False, "kv_transfer_config": on_disk(tmp_path)}
    saved = run(engines(model, **options), JOBS)
    assert count_ties(saved, expected) == 0
    assert len(list(tmp_path.iterdir())) == len(JOBS)
    engines.close()
    loaded = run(engines(model, **options), JOBS)
    assert count_ties(loaded, expected) == 0


def test_of_several_connectors_the_first_that_has_a_prompt_loads_it(
    engines: Engines, random_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, memory = random_model("gqa"), forget_memory()
    expected = run(engines(model), JOBS)
    children = [
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        },
        {
            "kv_connector": "MemoryConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "tests.support.memory_connector",
        },
    ]
    several = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": children}
    )
    memory.steps_to_save = 3
    engine = engines(model, enable_prefix_caching=False, kv_transfer_config=several)
    assert count_ties(run(engine, JOBS), expected) == 0
    while engine.scheduler.has_requests():
        engine.llm.llm_engine.step()
    num_on_disk, num_in_memory = len(list(tmp_path.iterdir())), len(memory.blocks)
    assert num_on_disk == len(JOBS)
    assert num_in_memory >= 3 + 2 + 2
    assert count_ties(run(engine, JOBS), expected) == 0
    assert memory.num_loaded == 0
    shutil.rmtree(tmp_path)
    memory.steps_to_load = 2
    assert count_ties(run(engine, JOBS), expected) == 0
    assert memory.num_loaded == 3 + 2 + 2
    while engine.scheduler.has_requests():
        engine.llm.llm_engine.step()
