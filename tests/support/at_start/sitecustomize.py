"""Python runs this at the start of processes that tests start, which find this folder on their PYTHONPATH.

To import vLLM makes so many objects that a sixth of its time goes to looking for garbage among them.
"""

import gc
import os

gc.set_threshold(100_000, 20, 20)

if os.environ.get("VLLM_TRIE_TEST_CPU") == "AVX2":  # vLLM's kernels obey torch alone
    import torch.cpu

    for name in ("avx512", "avx512_bf16", "amx_tile", "amx_fp16"):
        setattr(torch.cpu, f"_is_{name}_supported", lambda: False)
