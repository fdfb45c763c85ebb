"""What spares the search a wait for its device, an upload or a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

NEVER = float("-inf")
ALIGNMENT = 16  # bytes, at which Triton compiles kernels for aligned arguments


def sees(device: torch.device) -> bool:
    """Whether a look at a tensor of this device costs nothing, and may save work; elsewhere the host would wait."""
    return device.type == "cpu"


@lru_cache(maxsize=1024)
def constant(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[n] int64, uploaded once. Not to be written to."""
    return uploaded(np.array(values, dtype=np.int64), device)


@lru_cache(maxsize=1024)
def numbers(count: int, device: torch.device, last: int | None = None) -> torch.Tensor:
    """0, 1, ... [count], and `last` instead of what is greater. Kept: for counts that come again and again."""
    return torch.arange(count, device=device).clamp(max=count if last is None else last)


@lru_cache(maxsize=1024, typed=True)
def filled(shape: tuple[int, ...], value: float, device: torch.device) -> torch.Tensor:
    """`value` everywhere."""
    return torch.full(shape, value, device=device)


def uploaded(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """What the host has made, there: a copy for which nobody waits."""
    on_host = torch.from_numpy(array)
    return (on_host.pin_memory() if device.type == "cuda" else on_host).to(device, non_blocking=True)


def uploaded_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Some arrays, there, by one copy for which nobody waits; each is aligned."""
    starts = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)])
    packed = np.empty(starts[-1], dtype=np.uint8)
    for array, start in zip(arrays, starts, strict=False):
        packed[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
    there = uploaded(packed, device)
    return [
        there[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, start in zip(arrays, starts.tolist(), strict=False)
    ]


def uploaded_once(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The same of an int64 array that comes again and again, uploaded the first time. Not to be written to."""
    return _uploaded_once(array.astype(np.int64).tobytes(), array.shape, device)


@lru_cache(maxsize=256)
def _uploaded_once(content: bytes, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return uploaded(np.frombuffer(content, np.int64).reshape(shape).copy(), device)
