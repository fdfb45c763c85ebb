"""Measures how long the device takes for work that the host launches and does not wait for."""

from __future__ import annotations

import time

import torch


class DraftStopwatch:
    """Measures from its creation until `stop`; on a GPU, between these points of its stream.

    Args:
        device: The device that does the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_of_stream, self._started, self._stopped = device.type == "cuda", 0.0, 0.0
        if self._is_of_stream:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record()
        else:
            self._started = time.perf_counter()

    def stop(self) -> None:
        """Stops measuring: what is launched later does not count."""
        if self._is_of_stream:
            self._events[1].record()
        else:
            self._stopped = time.perf_counter()

    def seconds(self) -> float:
        """The seconds between start and stop. Waits until the device reaches the stop."""
        if not self._is_of_stream:
            return self._stopped - self._started
        first, last = self._events
        last.synchronize()
        return first.elapsed_time(last) / 1000
