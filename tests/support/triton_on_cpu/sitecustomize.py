"""Lets vLLM's V2 runner start on a CPU: Triton's interpreter, and a "driver" that says it is there.

Python runs this at its start in processes that have this folder in PYTHONPATH; the tests run it by hand before
anything imports Triton.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import triton.backends


class Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class Compiler:
    @staticmethod
    def supports_target(target: object) -> bool:
        return False


triton.backends.backends["cpu"] = triton.backends.Backend(compiler=Compiler, driver=Driver)
