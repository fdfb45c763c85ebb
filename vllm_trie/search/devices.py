"""What spares the search a wait for its device, an upload or a kernel."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

NEVER = float("-inf")


def sees(device: torch.device) -> bool:
    """Whether a look at a tensor of this device costs nothing, and may save work; elsewhere the host would wait."""
    return device.type == "cpu"


@lru_cache(maxsize=1024)
def constant(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[n] int64, uploaded once. Not to be written to."""
    return torch.tensor(values, dtype=torch.int64, device=device)


@lru_cache(maxsize=1024)
def numbers(count: int, device: torch.device, last: int | None = None) -> torch.Tensor:
    """0, 1, ... [count], and `last` instead of what is greater. Kept: for counts that come again and again."""
    return torch.arange(count, device=device).clamp(max=count if last is None else last)


@lru_cache(maxsize=1024)
def filled(shape: tuple[int, ...], value: int, device: torch.device) -> torch.Tensor:
    """`value` everywhere."""
    return torch.full(shape, value, device=device)


def uploaded(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """What the host has made, there: a copy for which nobody waits."""
    on_host = torch.from_numpy(array)
    return (on_host.pin_memory() if device.type == "cuda" else on_host).to(device, non_blocking=True)
