"""What launches of kernels need: where there are kernels, and whole numbers.

Triton has the same functions of numbers, of which each call takes microseconds.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch


@cache
def worker_runs_kernels_on(device: torch.device) -> bool:
    """Whether kernels do the work on this device; elsewhere torch does."""
    return device.type == "cuda"


@cache
def worker_module_for_gpus(module: str) -> Any:
    """A module of `vllm_trie.worker` that GPUs alone need, as those with kernels: engines on CPUs load none of them."""
    return import_module(f"vllm_trie.worker.{module}")


def cdiv(count: int, size: int) -> int:
    """Parts of `size`, the last one maybe less."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The first power of two that is not below `count`, 1 or more."""
    return 1 << (count - 1).bit_length()
