"""Compiles kernels together for a GPU that is not there, and prints what was compiled, as JSON.

Run by a test, in a process of its own: where Triton interprets, it compiles nothing.
"""

from __future__ import annotations

import json
from threading import local
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from vllm_trie.search.rank import SearchCandidates
from vllm_trie.worker.kernels import slots
from vllm_trie.worker.kernels.compiling import compile_kernels_together

WIDTHS = 3, 4, 9  # beams, for two sizes of the kernel
DEVICE = 1  # of this rank; a thread begins with the first one


class Device(local):
    """As CUDA has it, of each thread."""

    current = 0


of_thread = Device()
device: Any = SimpleNamespace(
    get_current_device=lambda: of_thread.current,
    set_current_device=lambda number: setattr(of_thread, "current", number),
    get_current_stream=lambda _: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
)


def launch() -> None:
    for width in WIDTHS:
        parents, tokens = torch.zeros(2, 1, 2 * width, dtype=torch.int64)
        candidates = SearchCandidates(parents, tokens, torch.zeros(1, 2 * width))
        slots.launch_select_next(candidates, torch.ones(1, 2 * width, dtype=torch.bool), width, width)


if __name__ == "__main__":
    triton.runtime.driver.set_active(device)
    device.set_current_device(DEVICE)
    counts = [compile_kernels_together(launch) for _ in range(2)]
    variants = slots._select_next_kernel.device_caches[DEVICE][0].values()
    print(json.dumps({"counts": counts, "compiled": [isinstance(kernel, CompiledKernel) for kernel in variants]}))
