"""Steps of selection as CUDA graphs: what the host would ask of a GPU operation by operation, asked for at once.

A step of few beams keeps a GPU busy for less time than the host needs to launch it. A graph reads and writes where it
did when it was captured. So what a step reads is copied to where graphs read it, and what it decides from where they
write it: one graph serves any rows of any batch, and what was decided stays as it is when the next step is taken.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.devices import pinned_search_tensors, search_numbers
from vllm_trie.search.rules import SearchInputs, SearchRules
from vllm_trie.search.step_result import NextSearchBeams, PackedSearchStep
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.worker.kernels import TakeStep
from vllm_trie.worker.kernels.tiles import MOST_PER_ROW, KernelLogits

MOST_LOGITS = 1 << 22  # of a step; one of more keeps the device busy for longer than the host
MOST_LOGITS_OF_TORCH = 1 << 21  # of a step that torch takes: what it needs beside its logits, nobody else can use
BYTES_OF_LOGIT, MOST_BYTES_BESIDE = 56, 64 << 20  # of that memory, at most; and of what torch takes more than it needs
MOST_ROWS = 256
MOST_GRAPHS = 64  # that are kept, those that were needed last
MOST_SEEN = 256  # steps that came once, of which it is kept that they did
MOST_STOPS = 64  # tokens: each step that is known to have come holds its own

Key = tuple[Any, ...]


class SelectionGraph(NamedTuple):
    """A step that was captured.

    Args:
        replay: Takes it again.
        taken: What it writes.
        used: What else lies in memory that it reads or writes.
    """

    replay: Callable[[], None]
    taken: PackedSearchStep
    used: list[torch.Tensor]


class SelectionGraphs:
    """The graphs of one runner. A step is captured when it comes for the second time.

    Args:
        device: The runner's.
        dtype: Of its logits, as a rule.
        capture: Makes them.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, capture: SelectionGraphCapture) -> None:
        self._device, self._capture = device, capture
        # How often steps came that have no graph; here and below, what came last is at the end.
        self._seen: dict[Key, int] = {}
        self._graphs: dict[Key, SelectionGraph] = {}
        # What graphs read, taken before vLLM measures the memory that is left.
        self._logits = {of: torch.empty(MOST_LOGITS, dtype=of, device=device) for of in (dtype, torch.float32)}
        self._scores = torch.empty(MOST_ROWS, dtype=torch.float32, device=device)

    def room(self) -> torch.Tensor:
        """As much memory as graphs may take of their own, [bytes] uint8."""
        num_bytes = BYTES_OF_LOGIT * MOST_LOGITS_OF_TORCH + MOST_BYTES_BESIDE
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def hold(
        self, rules: SearchRules, inputs: SearchInputs, logits: KernelLogits, beams: SearchBeams, are_kernels: bool
    ) -> bool:
        """Whether graphs may hold such steps.

        They are small, and come again: whatever the host alone knows is no part of them, nor what changes with the
        length of hypotheses.

        Args:
            rules, inputs, logits, beams: Of the step.
            are_kernels: Kernels take it, not torch.
        """
        knows_more = inputs.draws or inputs.completes is not None or beams.states or beams.rank_scores is not None
        has_long_key = len(rules.stops.last_token_ids) > MOST_STOPS
        if knows_more or rules.constraints or has_long_key or not 0 <= (rules.num_logprobs or 0) <= MOST_PER_ROW:
            return False
        if _selection_graph_key(rules, logits, beams) in self._graphs:
            return True
        num_rows, values, (stride, one) = len(logits.which), logits.values, logits.values.stride()
        is_laid_out = values.dtype in self._logits and one == 1 and stride >= values.shape[1]
        most_logits = MOST_LOGITS
        if not are_kernels:
            # Others need more memory in torch than their rows, or come once, as their factor changes with the length.
            most_logits = (
                MOST_LOGITS_OF_TORCH if rules.strategy in (BestStrategy("hf"), BestStrategy("tridecode")) else 0
            )
        return is_laid_out and num_rows <= MOST_ROWS and num_rows * stride <= most_logits

    def take(
        self, rules: SearchRules, logits: KernelLogits, beams: SearchBeams, take_rows: TakeStep
    ) -> PackedSearchStep | None:
        """Take a step by its graph. None, and nothing is done, if it comes for the first time, or memory is short.

        Args:
            rules: Those of G groups.
            logits: Of all their rows, group after group.
            beams: What these carry.
            take_rows: Takes a step, by kernels or torch.
        """
        num_rows, values = len(logits.which), logits.values
        vocab_size, stride = values.shape[1], values.stride(0)
        key = _selection_graph_key(rules, logits, beams)
        if (graph := self._graphs.pop(key, None)) is None:
            count = self._seen.get(key, 0) + 1
            _keep_selection_graph(self._seen, key, count, MOST_SEEN)
            # Where there is no memory, it is asked for again ever more rarely: each time waits for the driver.
            is_asked = count > 1 and count.bit_count() == 1
            if not (is_asked and self._capture.has_room(BYTES_OF_LOGIT * num_rows * vocab_size + MOST_BYTES_BESIDE)):
                return None
            del self._seen[key]
        # As far apart as they were: kernels are compiled for that.
        own_values = self._logits[values.dtype][: num_rows * stride].view(num_rows, stride)[:, :vocab_size]
        torch.index_select(values, 0, logits.which, out=own_values)
        own_scores = self._scores[:num_rows].view(beams.scores.shape).copy_(beams.scores)
        if graph is None:
            graph = self._captured(logits._replace(values=own_values), SearchBeams(own_scores), take_rows)
        _keep_selection_graph(self._graphs, key, graph, MOST_GRAPHS)
        graph.replay()
        going, words, layout = graph.taken
        return PackedSearchStep(
            NextSearchBeams(going.parents.clone(), going.tokens.clone(), going.scores.clone()), words.clone(), layout
        )

    def _captured(self, logits: KernelLogits, beams: SearchBeams, take_rows: TakeStep) -> SelectionGraph:
        num_rows = len(logits.which)
        sampled = torch.empty(num_rows, 1, dtype=torch.int64, device=self._device)
        with pinned_search_tensors() as constants:
            which = search_numbers(num_rows, self._device)
            logits = logits._replace(which=which)
            take_rows(logits, beams, which, sampled)  # so that nothing is compiled or uploaded in the capture
            replay, taken = self._capture(lambda: take_rows(logits, beams, which, sampled))
        return SelectionGraph(replay, taken, [sampled, logits.classes, logits.mixed, *constants])


def _selection_graph_key(rules: SearchRules, logits: KernelLogits, beams: SearchBeams) -> Key:
    """What steps have in common that a graph may take."""
    values = logits.values
    return rules, beams.scores.shape, values.dtype, values.shape[1], values.stride()


def _keep_selection_graph(kept: dict[Key, Any], key: Key, value: Any, most: int) -> None:
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > most:
        del kept[next(iter(kept))]


class SelectionGraphCapture:
    """Captures CUDA graphs, which are replayed one after the other: what one writes for itself, another may, too."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None  # kept: with the last graph of a pool the pool goes

    def has_room(self, num_bytes: int) -> bool:
        """Whether so much of the device's memory is free."""
        free, _ = torch.cuda.mem_get_info()
        return free >= num_bytes

    def __call__(self, run: Callable[[], PackedSearchStep]) -> tuple[Callable[[], None], PackedSearchStep]:
        """What replays a run that has just been made before, and where it writes."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), _garbage_left_by_graphs():
            # `torch.cuda.graph` would wait for the device, and look for garbage.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            self._first = self._first or graph
            try:
                taken = run()
            finally:
                graph.capture_end()
        return graph.replay, taken


@contextmanager
def _garbage_left_by_graphs() -> Iterator[None]:
    """Within it garbage is left where it is: some of it, as it goes, asks of the device what no capture can hold."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
