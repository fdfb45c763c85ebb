"""Steps of selection as CUDA graphs: what the host would ask of a GPU operation by operation, asked for at once.

A step of few beams keeps a GPU busy for less time than the host needs to launch it. A graph reads and writes where it
did when it was captured. So what a step reads is copied to where graphs read it, and what it decides from where they
write it: one graph serves any rows of any batch, and what was decided stays as it is when the next step is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vllm_trie.search.beams import Beams
from vllm_trie.search.devices import borrowed, numbers
from vllm_trie.search.rules import Means, SelectRules
from vllm_trie.search.step_result import Going
from vllm_trie.worker.kernels.best import Taken
from vllm_trie.worker.kernels.step import TakeStep, by_kernels
from vllm_trie.worker.kernels.tiles import RowLogits

MOST_LOGITS = 1 << 22  # of a step; one of more keeps the device busy for longer than the host
MOST_LOGITS_OF_TORCH = 1 << 21  # of a step that torch takes: what it needs beside its logits, nobody else can use
BYTES_OF_LOGIT = 56  # of that memory, at most
MOST_ROWS = 256
MOST_GRAPHS = 64  # that are kept, those that were needed last

Key = tuple[Any, ...]


class StepGraph(NamedTuple):
    """A step that was captured.

    Args:
        replay: Takes it again.
        taken: What it writes.
        used: What else lies in memory that it reads or writes.
    """

    replay: Callable[[], None]
    taken: Taken
    used: list[torch.Tensor]


class StepGraphs:
    """The graphs of one runner. A step is captured when it comes for the second time.

    Args:
        device: The runner's.
        dtype: Of its logits, as a rule.
        capture: Makes them.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, capture: GraphCapture) -> None:
        self._device, self._capture = device, capture
        self._graphs: dict[Key, StepGraph | None] = {}  # None: it came once; what was needed last is at the end
        # What graphs read, taken before vLLM measures the memory that is left.
        self._logits = {of: torch.empty(MOST_LOGITS, dtype=of, device=device) for of in (dtype, torch.float32)}
        self._of_beams = torch.empty(2, MOST_ROWS, dtype=torch.float32, device=device)

    def hold(self, rules: SelectRules, means: Means, logits: RowLogits, beams: Beams) -> bool:
        """Whether graphs may hold such steps: of few rows, without constraints and whatever the host alone knows."""
        if rules.constraints or means.draws or means.completes is not None or logits.values.dtype not in self._logits:
            return False
        num_rows, (_, vocab_size) = len(logits.which), logits.values.shape
        most_logits = MOST_LOGITS if by_kernels(rules, beams, vocab_size) else MOST_LOGITS_OF_TORCH
        return num_rows <= MOST_ROWS and num_rows * vocab_size <= most_logits

    def take(self, rules: SelectRules, logits: RowLogits, beams: Beams, take_rows: TakeStep) -> Taken | None:
        """Take a step by its graph. None, and nothing is done, if it comes for the first time, or there is no memory.

        Args:
            rules: Those of G groups.
            logits: Of all their rows, group after group.
            beams: What these carry.
            take_rows: Takes a step, by kernels or torch.
        """
        (num_rows,), vocab_size, dtype = logits.which.shape, logits.values.shape[1], logits.values.dtype
        key = rules, beams.scores.shape, beams.rank_scores is None, vocab_size, dtype
        if (graph := self._graphs.get(key)) is None:
            is_new = key not in self._graphs
            self._keep(key, None)
            if is_new or not self._capture.has_room(BYTES_OF_LOGIT * num_rows * vocab_size):
                return None
        values = self._logits[dtype][: num_rows * vocab_size].view(num_rows, vocab_size)
        torch.index_select(logits.values, 0, logits.which, out=values)
        scores, rank_scores = self._of_beams
        own = Beams(_copied(beams.scores, scores))
        if beams.rank_scores is not None:
            own = own._replace(rank_scores=_copied(beams.rank_scores, rank_scores))
        if graph is None:
            graph = self._captured(rules, logits._replace(values=values), own, take_rows)
        self._keep(key, graph)
        graph.replay()
        going, words, layout = graph.taken
        ranks = None if going.rank_scores is None else going.rank_scores.clone()
        own_going = Going(going.parents.clone(), going.tokens.clone(), going.scores.clone(), ranks)
        return Taken(own_going, words.clone(), layout)

    def _keep(self, key: Key, graph: StepGraph | None) -> None:
        self._graphs.pop(key, None)
        self._graphs[key] = graph
        if len(self._graphs) > MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]

    def _captured(self, rules: SelectRules, logits: RowLogits, beams: Beams, take_rows: TakeStep) -> StepGraph:
        num_rows = len(logits.which)
        sampled = torch.empty(num_rows, 1, dtype=torch.int64, device=self._device)
        with borrowed() as constants:
            which = numbers(num_rows, self._device)
            replay, taken = self._capture(lambda: take_rows(rules, logits._replace(which=which), beams, which, sampled))
        return StepGraph(replay, taken, [sampled, *constants])


def _copied(of_rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The same where graphs read it."""
    return place[: of_rows.numel()].view(of_rows.shape).copy_(of_rows)


class GraphCapture:
    """Captures CUDA graphs, which are replayed one after the other: what one writes for itself, another may, too."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def has_room(self, num_bytes: int) -> bool:
        """Whether so much of the device's memory is free."""
        free, _ = torch.cuda.mem_get_info()
        return free >= num_bytes

    def __call__(self, run: Callable[[], Taken]) -> tuple[Callable[[], None], Taken]:
        """What replays a run that has been made before, and where it writes."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # `torch.cuda.graph` would wait for the device, and look for garbage.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                taken = run()
            finally:
                graph.capture_end()
        return graph.replay, taken
