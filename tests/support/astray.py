"""Run by a test: an engine as its user has it, one rank of which goes astray. Says what the user sees."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"

from vllm import LLM
from vllm.v1.engine.exceptions import EngineDeadError

from tests.support.parallel_engine import RANKS, LookedInto
from vllm_trie import beam_params

if __name__ == "__main__":
    llm = LLM(
        str(Path(sys.argv[1])),
        tensor_parallel_size=RANKS,
        worker_extension_cls=f"{LookedInto.__module__}.{LookedInto.__name__}",
        additional_config={"trie_beam": {"debug_rank_check": True}},
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=1 << 28,
    )
    prompts = ["def is_prime(number):", "import os\n"]
    params = beam_params(4, n=2, max_tokens=8)
    assert all(output.outputs[0].text for output in llm.generate(prompts, params))
    print("agreed")
    llm.collective_rpc("go_astray", args=("beams", 1))
    try:
        llm.generate(prompts, params)
    except EngineDeadError as error:
        print(f"ended: {error}")
