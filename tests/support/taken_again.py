"""In the place of CUDA graphs: what would be replayed is taken once more."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

from vllm_trie.search import devices
from vllm_trie.worker.select.step_graphs import SelectionGraphCapture


class TakenAgain(SelectionGraphCapture):
    """Replaying takes the step once more, and fails where something is uploaded.

    `count`: captures; `has_memory`: whether there may be any; `waits`: how often copies were waited for.
    """

    def __init__(self) -> None:
        self.count = self.waits = 0
        self.has_memory = True

    def has_room(self, num_bytes: int) -> bool:
        return self.has_memory

    def wait_for_copies(self) -> None:
        self.waits += 1

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.count += 1

        def replay() -> None:
            with patch.object(devices, "uploaded_for_search", side_effect=AssertionError("uploaded in a graph")):
                run()

        return replay
