"""In the place of CUDA graphs: what would be replayed is taken once more."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

from vllm_trie.search import devices
from vllm_trie.search.step_result import PackedSearchStep
from vllm_trie.worker.select.step_graphs import SelectionGraphCapture


class TakenAgain(SelectionGraphCapture):
    """Replaying takes the step once more, and writes where the first one has.

    As a capture does, it leaves nothing there, and fails where something is uploaded. `count`: captures; `has_memory`:
    whether there may be any.
    """

    def __init__(self) -> None:
        self.count = 0
        self.has_memory = True

    def has_room(self, num_bytes: int) -> bool:
        return self.has_memory

    def __call__(self, run: Callable[[], PackedSearchStep]) -> tuple[Callable[[], None], PackedSearchStep]:
        self.count += 1
        with patch.object(devices, "uploaded_for_search", side_effect=AssertionError("uploaded in a capture")):
            kept = run()
        places = [*kept.going[:3], kept.words]
        for place in places:
            place.fill_(-1)

        def replay() -> None:
            taken = run()
            for place, result in zip(places, [*taken.going[:3], taken.words], strict=True):
                place.copy_(result)

        return replay, kept
