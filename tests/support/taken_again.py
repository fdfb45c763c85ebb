"""Graphs of steps, counted; without a GPU, what would be replayed is taken once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import torch
from vllm.v1.worker.gpu import async_utils

from vllm_trie.search import devices
from vllm_trie.worker import runner
from vllm_trie.worker.select.selection_graphs import SelectionGraphCapture


class TakenAgain(SelectionGraphCapture):
    """Replaying takes the step once more, and fails where something is uploaded.

    `count`: captures; `replays`: of all; `has_memory`: whether there may be any; `runs_out`: a capture finds less than
    there seemed to be; `waits`: how often it was waited for copies.
    """

    def __init__(self) -> None:
        self.count = self.replays = self.waits = 0
        self.has_memory, self.runs_out = True, False

    def has_room(self, num_bytes: int) -> bool:
        return self.has_memory

    def wait_for_copies(self) -> None:
        self.waits += 1

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        if self.runs_out:
            raise torch.OutOfMemoryError
        self.count += 1

        def replay() -> None:
            self.replays += 1
            with patch.object(devices, "uploaded_for_search", side_effect=AssertionError("uploaded in a graph")):
                run()

        return replay


class ReplayedSteps(SelectionGraphCapture):
    """Real graphs. `count`: captures; `replays`: of all."""

    def __init__(self, copying: Sequence[torch.cuda.Stream]) -> None:
        super().__init__(copying)
        self.count = self.replays = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.count += 1
        replay_graph = super().__call__(run)

        def replay() -> None:
            self.replays += 1
            replay_graph()

        return replay


@contextmanager
def copies_made() -> Iterator[None]:
    """Within it, what goes to the host is copied, as from a device: what a CPU has is else seen where it is."""

    def copied(tensor: torch.Tensor | None) -> np.ndarray | None:
        return None if tensor is None else tensor.numpy().copy()

    with ExitStack() as stack:
        for module in (async_utils, runner):
            stack.enter_context(patch.object(module, "async_copy_to_np", copied))
        yield
