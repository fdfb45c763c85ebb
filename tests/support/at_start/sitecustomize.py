"""Python runs this at the start of processes that tests start, which find this folder on their PYTHONPATH.

To import vLLM makes so many objects that a sixth of its time goes to looking for garbage among them.
"""

import gc
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder

gc.set_threshold(100_000, 20, 20)

if os.environ.get("VLLM_TRIE_TEST_CPU") == "AVX2":  # vLLM's kernels obey torch alone
    import torch.cpu

    for name in ("avx512", "avx512_bf16", "amx_tile", "amx_fp16"):
        setattr(torch.cpu, f"_is_{name}_supported", lambda: False)


class IdleWorkers(MetaPathFinder):
    """Finds vLLM's queue between processes, and lets its readers sleep until they are told that something came.

    They would look without a break for a second after all that comes, which costs more than the tests' searches do.
    """

    NAME = "vllm.distributed.device_communicators.shm_broadcast"

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != self.NAME:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        spec.loader.exec_module = _then_sleep(spec.loader)
        return spec


def _then_sleep(loader: Loader) -> object:
    execute = loader.exec_module

    def execute_and_patch(module: object) -> None:
        execute(module)
        start = module.SpinCondition.__init__

        def sleep_at_once(*args: object, **options: object) -> None:
            start(*args, **{"busy_loop_s": 0.0, **options})

        module.SpinCondition.__init__ = sleep_at_once

    return execute_and_patch


sys.meta_path.insert(0, IdleWorkers())
