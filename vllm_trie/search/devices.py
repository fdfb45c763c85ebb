"""What spares the search a wait for its device, an upload or a kernel."""

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
ALIGNMENT = 16  # bytes, at which Triton compiles kernels for aligned arguments


def is_searched_on_host(device: torch.device) -> bool:
    """Whether a look at a tensor of this device costs nothing, and may save work; elsewhere the host would wait."""
    return device.type == "cpu"


_pins: list[list[torch.Tensor]] = []


@contextmanager
def pinned_search_tensors() -> Iterator[list[torch.Tensor]]:
    """The `cached_search_tensors` that are asked for within it: whoever holds them keeps them where they are."""
    tensors: list[torch.Tensor] = []
    _pins.append(tensors)
    try:
        yield tensors
    finally:
        _pins.pop()


def cached_search_tensors(most: int) -> Callable[[Callable[P, torch.Tensor]], Callable[P, torch.Tensor]]:
    """Lets a function make a tensor once for the same arguments, as far as the `most` newest go."""

    def decorate(make: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
        cached: Any = lru_cache(most, typed=True)(make)

        @wraps(make)
        def get(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
            tensor: torch.Tensor = cached(*args, **kwargs)
            for tensors in _pins:
                tensors.append(tensor)
            return tensor

        get.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
        return get

    return decorate


class SearchCache(Generic[Made]):
    """What was made of keys, as far as that which was used last takes so many bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._total = most_bytes, 0
        self._made = OrderedDict[Any, tuple[Made, int]]()  # and its bytes

    def get(self, key: Any, make: Callable[[], Made], num_bytes: Callable[[Made], int]) -> Made:
        """What was made of a key, or is made now; `num_bytes`: what it takes, and its key."""
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
        """Keep nothing."""
        self._made.clear()
        self._total = 0


def cached_search_tensors_within(
    most_bytes: int, num_bytes_of_key: Callable[..., int]
) -> Callable[[Callable[[*Arguments], torch.Tensor]], Callable[[*Arguments], torch.Tensor]]:
    """Lets a function make a tensor once for the same arguments, as far as those used last take so many bytes.

    Args:
        most_bytes: Of all tensors that stay, and of what they were made of.
        num_bytes_of_key: What arguments take on the host.
    """

    def decorate(make: Callable[[*Arguments], torch.Tensor]) -> Callable[[*Arguments], torch.Tensor]:
        newest = SearchCache[torch.Tensor](most_bytes)

        @wraps(make)
        def get(*args: *Arguments) -> torch.Tensor:
            tensor = newest.get(args, lambda: make(*args), lambda made: made.nbytes + num_bytes_of_key(*args))
            for tensors in _pins:
                tensors.append(tensor)
            return tensor

        get.cache_clear = newest.clear  # type: ignore[attr-defined]
        return get

    return decorate


@cached_search_tensors(1024)
def search_constant(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[n] int64 of few values, uploaded once. Not to be written to."""
    return uploaded_for_search(np.array(values, dtype=np.int64), device)


@cached_search_tensors(1024)
def search_numbers(count: int, device: torch.device, last: int | None = None) -> torch.Tensor:
    """0, 1, ... [count], and `last` instead of what is greater. Kept: for counts that come again and again."""
    return torch.arange(count, device=device).clamp(max=count if last is None else last)


@cached_search_tensors(1024)
def filled_for_search(shape: tuple[int, ...], value: float, device: torch.device) -> torch.Tensor:
    """`value` everywhere."""
    return torch.full(shape, value, device=device)


def uploaded_for_search(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """What the host has made, there: a copy for which nobody waits."""
    on_host = torch.from_numpy(array)
    return (on_host.pin_memory() if device.type == "cuda" else on_host).to(device, non_blocking=True)


def upload_for_search(array: np.ndarray, out: torch.Tensor) -> None:
    """The same, to where it is to be: it is there as it is now, whatever becomes of the array."""
    on_host = torch.from_numpy(array)
    out.copy_(on_host.pin_memory() if out.is_cuda else on_host, non_blocking=True)


def uploaded_together_for_search(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Some arrays, there, by one copy for which nobody waits; each is aligned."""
    starts = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)])
    packed = np.empty(starts[-1], dtype=np.uint8)
    for array, start in zip(arrays, starts, strict=False):
        packed[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
    there = uploaded_for_search(packed, device)
    return [
        there[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, start in zip(arrays, starts.tolist(), strict=False)
    ]


class SearchCopyToHost:
    """A copy of what a tensor holds at this moment of its device's stream, for which nobody waits yet."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._on_host = tensor.to("cpu", non_blocking=True)
        self._is_there = torch.cuda.Event() if tensor.is_cuda else None  # type: ignore[no-untyped-call]
        if self._is_there is not None:
            self._is_there.record()

    def wait(self) -> np.ndarray:
        """It, once it is there; for what the device does after it, the host does not wait."""
        if self._is_there is not None:
            self._is_there.synchronize()
        return self._on_host.numpy()


def uploaded_once_for_search(
    array: np.ndarray, device: torch.device, dtype: type[np.integer[Any]] = np.int64
) -> torch.Tensor:
    """The same of integers that come again and again, uploaded the first time. Not to be written to."""
    return _uploaded_once_for_search(array.astype(dtype).tobytes(), array.shape, dtype, device)


@cached_search_tensors(256)
def _uploaded_once_for_search(
    content: bytes, shape: tuple[int, ...], dtype: type[np.integer[Any]], device: torch.device
) -> torch.Tensor:
    return uploaded_for_search(np.frombuffer(content, dtype).reshape(shape).copy(), device)
