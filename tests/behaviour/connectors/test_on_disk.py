"""vLLM's example connector, which keeps the KV of prompts on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig

from tests.support.engine import Engines
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
    print([o.num_cached_tokens for o in loaded])
    assert count_ties(loaded, expected) == 0
