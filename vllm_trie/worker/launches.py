"""Where kernels run, and arithmetic for launching them.

Triton has the same arithmetic, but each call takes microseconds.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch


@cache
def worker_runs_kernels_on(device: torch.device) -> bool:
    """Whether Triton kernels do the work on this device; otherwise torch does."""
    return device.type == "cuda"


@cache
def worker_module_for_gpus(module: str) -> Any:
    """A module below `vllm_trie` that only GPUs need, such as kernels: engines on CPUs may have no Triton."""
    return import_module(f"vllm_trie.{module}")


def cdiv(count: int, size: int) -> int:
    """Number of parts of `size`; the last one may be smaller."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The first power of two that is not below `count`, which is at least 1."""
    return 1 << (count - 1).bit_length()
