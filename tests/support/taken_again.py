"""In the place of CUDA graphs: what would be replayed is taken once more."""

from __future__ import annotations

from collections.abc import Callable

from vllm_trie.worker.kernels.best import Taken


class TakenAgain:
    """A capture as `StepGraphs` asks for it. Replaying takes the step once more, and writes where the first one has.

    As a graph's capture does, it leaves nothing there. `count`: captures.
    """

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, run: Callable[[], Taken]) -> tuple[Callable[[], None], Taken]:
        self.count += 1
        kept = run()
        places = [*kept.going[:3], kept.words]
        for place in places:
            place.fill_(-1)

        def replay() -> None:
            taken = run()
            for place, result in zip(places, [*taken.going[:3], taken.words], strict=True):
                place.copy_(result)

        return replay, kept
