"""Spares the search waits for its device, uploads and kernel launches: cached tensors and asynchronous copies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, Generic, ParamSpec, TypeVar, TypeVarTuple

import numpy as np
import torch

P = ParamSpec("P")
Made = TypeVar("Made")
Arguments = TypeVarTuple("Arguments")

NEVER = float("-inf")
ALIGNMENT = 16  # bytes, for which Triton compiles kernels with aligned arguments


def is_searched_on_host(device: torch.device) -> bool:
    """Whether reading a tensor of this device costs nothing and may save work; on others the host would wait."""
    return device.type == "cpu"


_pins: list[list[torch.Tensor]] = []


@contextmanager
def pinned_search_tensors() -> Iterator[list[torch.Tensor]]:
    """Collects the `cached_search_tensors` that are requested within it, so that whoever holds the list pins them."""
    tensors: list[torch.Tensor] = []
    _pins.append(tensors)
    try:
        yield tensors
    finally:
        _pins.pop()


def _pin(tensor: torch.Tensor) -> None:
    for tensors in _pins:
        tensors.append(tensor)


def cached_search_tensors(most: int) -> Callable[[Callable[P, torch.Tensor]], Callable[P, torch.Tensor]]:
    """Lets a function make a tensor once for the same arguments; the `most` newest are cached."""

    def decorate(make: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
        cached: Any = lru_cache(most, typed=True)(make)

        @wraps(make)
        def get(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
            tensor: torch.Tensor = cached(*args, **kwargs)
            _pin(tensor)
            return tensor

        get.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
        return get

    return decorate


class SearchCache(Generic[Made]):
    """An LRU cache bounded by bytes; the newest entry always stays."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._total = most_bytes, 0
        self._made = OrderedDict[Any, tuple[Made, int]]()  # and its bytes

    def get(self, key: Any, make: Callable[[], Made], num_bytes: Callable[[Made], int]) -> Made:
        """The value of a key, made now if it is not cached; `num_bytes` is what the value and its key take."""
        if (found := self._made.get(key)) is None:
            made = make()
            found = self._made[key] = made, num_bytes(made)
            self._total += found[1]
            while self._total > self._most_bytes and len(self._made) > 1:
                _, (_, of_oldest) = self._made.popitem(last=False)
                self._total -= of_oldest
        self._made.move_to_end(key)
        return found[0]

    def clear(self) -> None:
        """Empties the cache."""
        self._made.clear()
        self._total = 0


def cached_search_tensors_within(
    most_bytes: int, num_bytes_of_key: Callable[..., int]
) -> Callable[[Callable[[*Arguments], torch.Tensor]], Callable[[*Arguments], torch.Tensor]]:
    """Lets a function make a tensor once for the same arguments; those used last are cached, within a bound on bytes.

    Args:
        most_bytes: Of all cached tensors and their keys.
        num_bytes_of_key: Bytes that the arguments take on the host.
    """

    def decorate(make: Callable[[*Arguments], torch.Tensor]) -> Callable[[*Arguments], torch.Tensor]:
        newest = SearchCache[torch.Tensor](most_bytes)

        @wraps(make)
        def get(*args: *Arguments) -> torch.Tensor:
            tensor = newest.get(args, lambda: make(*args), lambda made: made.nbytes + num_bytes_of_key(*args))
            _pin(tensor)
            return tensor

        get.cache_clear = newest.clear  # type: ignore[attr-defined]
        return get

    return decorate


@cached_search_tensors(1024)
def search_constant(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[n] int64 of a few values, uploaded once. Read-only."""
    return uploaded_for_search(np.array(values, dtype=np.int64), device)


_longest_arange: dict[torch.device, torch.Tensor] = {}


def search_arange(count: int, device: torch.device, last: int | None = None) -> torch.Tensor:
    """0, 1, ... [count], capped at `last`. Read-only, part of the longest one that a device has needed so far."""
    if last is not None:
        return _capped_search_arange(count, last, device)
    longest = _longest_arange.get(device)
    if longest is None or len(longest) < count:
        longest = _longest_arange[device] = torch.arange(count, device=device)
    _pin(longest)
    return longest[:count]


@cached_search_tensors(1024)
def _capped_search_arange(count: int, last: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device).clamp(max=last)


@cached_search_tensors(1024)
def filled_for_search(shape: tuple[int, ...], value: float, device: torch.device) -> torch.Tensor:
    """A tensor filled with `value`. Read-only."""
    return torch.full(shape, value, device=device)


def uploaded_for_search(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of an array on the device, which nobody waits for."""
    on_host = torch.from_numpy(array)
    return (on_host.pin_memory() if device.type == "cuda" else on_host).to(device, non_blocking=True)


def copy_into_for_search(array: np.ndarray, out: torch.Tensor) -> None:
    """Copies an array into `out` without waiting; later changes of the array do not reach it."""
    on_host = torch.from_numpy(array)
    out.copy_(on_host.pin_memory() if out.is_cuda else on_host, non_blocking=True)


def uploaded_together_for_search(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copies of several arrays on the device, by one transfer that nobody waits for; each is aligned."""
    starts = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)])
    packed = np.empty(starts[-1], dtype=np.uint8)
    for array, start in zip(arrays, starts, strict=False):
        packed[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
    on_device = uploaded_for_search(packed, device)
    return [
        on_device[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, start in zip(arrays, starts.tolist(), strict=False)
    ]


class SearchCopyToHost:
    """An asynchronous copy to the host of what a tensor holds at this point of its device's stream."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._on_host = tensor.to("cpu", non_blocking=True)
        self._is_there = torch.cuda.Event() if tensor.is_cuda else None  # type: ignore[no-untyped-call]
        if self._is_there is not None:
            self._is_there.record()

    def wait(self) -> np.ndarray:
        """The array, once the copy is done; does not wait for what the device does afterwards."""
        if self._is_there is not None:
            self._is_there.synchronize()
        return self._on_host.numpy()


def uploaded_once_for_search(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor int64 of integers that recur, uploaded the first time. Read-only."""
    return _uploaded_once_for_search(array.astype(np.int64).tobytes(), array.shape, device)


@cached_search_tensors(256)
def _uploaded_once_for_search(content: bytes, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return uploaded_for_search(np.frombuffer(content, np.int64).reshape(shape).copy(), device)
