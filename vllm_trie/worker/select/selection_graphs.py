"""Steps of selection as CUDA graphs, which the host launches at once instead of operation by operation.

A graph contains everything between the logits of a cohort and the copy of its decision to the host: selection, the
newest tokens of its rows, their states along a catalog, the fork of tokens, tables and KV, and the scores of the next
step. It reads and writes at the addresses of its capture. So what a group carries stays where the group has it
(`graph_tables`), and the graph looks up its address (`worker.kernels.beams`). Logits are read in place, too: by their
distance from an address that the graph knows.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import ref

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.catalog import ConstraintAlongItems
from vllm_trie.search.devices import pinned_search_tensors
from vllm_trie.search.rules import SearchInputs, SearchRules
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.worker.kernels import KernelStepSizes
from vllm_trie.worker.kernels.beams import KernelBeams, launch_put_down_beams, launch_take_up_beams
from vllm_trie.worker.kernels.tiles import MOST_PER_ROW, KernelLogits
from vllm_trie.worker.kv.kv_moves import KVFork
from vllm_trie.worker.rows.rows import Rows
from vllm_trie.worker.select.by_kernels import SelectionStepByTorch, select_by_kernels
from vllm_trie.worker.select.cohort import CohortLogits, SelectionBatchPlan
from vllm_trie.worker.select.graph_tables import SelectionGraphTables, put_where_graphs_find_it
from vllm_trie.worker.step_context import SelectedCohort

MOST_COPIED = 1 << 21  # the most logits of a step that are copied, as they are for all steps by torch
BYTES_OF_LOGIT, MOST_BYTES_WITHOUT_LOGITS = 56, 64 << 20  # at most: by torch per logit; by any step besides its logits
LOGITS_OF_BYTE = 8  # kernels take one byte for this many, at most
UNIT = 16  # logits: the unit of the start of rows, so that kernels know them to be aligned
MOST_GRAPHS = 128  # graphs to keep, those used last
MOST_OWN_BYTES = 32 << 20  # of these graphs: what they know of rows, what they decide, and constants they read
MOST_SEEN = 512  # steps that came once and are remembered
MOST_STOPS = 64  # tokens: each remembered step keeps its own
LIGHT_IN_TORCH = BestStrategy("hf"), BestStrategy("tridecode")
FAILED = "a step of selection cannot be captured as a CUDA graph, and no further ones will be: %s"

logger = init_logger("vllm.trie_beam.selection")

Key = tuple[Any, ...]


@dataclass(eq=False)
class SelectionGraph:
    """A step that is captured, or about to be.

    Args:
        replay: Takes the step.
        tables: What it knows of rows.
        decided: [G, n] int32, the packed step.
        copied: [R, V], logits, if they are copied for it.
        used: Other tensors that it reads, possibly shared with other graphs.
    """

    replay: Callable[[], None]
    tables: SelectionGraphTables
    decided: torch.Tensor
    copied: torch.Tensor | None
    used: list[torch.Tensor]


class SelectionGraphs:
    """The graphs of one runner. A step is captured when it comes for the second time.

    Args:
        rows: The runner's.
        dtype: The usual one of its logits.
        capture: Captures graphs.
        most_logits: The most logits of a step.
    """

    def __init__(self, rows: Rows, dtype: torch.dtype, capture: SelectionGraphCapture, most_logits: int) -> None:
        self._rows, self._capture, self._most_logits = rows, capture, most_logits
        # How often steps came that had no graph; here and below, the latest are last.
        self._seen: dict[Key, int] = {}
        self._graphs: dict[Key, SelectionGraph] = {}
        # What graphs read and write, allocated before vLLM measures the memory that is left.
        new = partial(torch.empty, device=rows.device)
        self._logits = {of: new(MOST_COPIED, dtype=of) for of in (dtype, torch.float32)}
        self._newest = torch.zeros(len(rows.all_tokens), 1, dtype=torch.int64, device=rows.device)
        self._of_batch = self._newest
        self._times = Counter[Key]()  # of each kind, how many there were in this step
        self._may_capture = True  # until a capture fails

    def room(self) -> torch.Tensor:
        """As much memory as graphs may allocate, [bytes] uint8."""
        num_bytes = BYTES_OF_LOGIT * MOST_COPIED + self._most_logits // LOGITS_OF_BYTE
        num_bytes += MOST_BYTES_WITHOUT_LOGITS + MOST_OWN_BYTES
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._rows.device)

    def begin_step(self, num_rows: int, count: int) -> torch.Tensor:
        """Lets the device continue once the host has the results of the last step.

        Returns:
            [num_rows, count] int64, for the newest tokens of the rows of a batch. With a count of 1 it is the same
            memory in every step, with the last step's tokens until graphs write to it.
        """
        if count > 1:
            return torch.zeros(num_rows, count, dtype=torch.int64, device=self._rows.device)
        self._capture.wait_for_copies()
        self._times.clear()
        if len(self._of_batch) != num_rows:
            self._of_batch = self._newest[:num_rows]
        return self._of_batch

    def take(self, plan: SelectionBatchPlan, step: CohortLogits, sampled: torch.Tensor) -> SelectedCohort | None:
        """Takes a step by its graph, and lets its rows fork; None if there is no graph, and nothing is done.

        There is none where graphs may not contain the step, where it comes for the first time, if memory is short, or
        after a capture has failed.

        Args:
            plan: The batch's.
            step: Of one of its cohorts.
            sampled: Receives the newest tokens; graphs only write to what `begin_step` has returned.
        """
        if sampled is not self._of_batch or not self._may_hold(step.cohort.rules):
            return None
        cohort, values = step.cohort, step.values
        num_tokens = plan.rows.num_tokens(cohort.places[:, 0])
        beams = cohort.groups[0].beams._replace(length=cohort.common_length(num_tokens))
        for group in cohort.groups:  # what no graph reads
            if group.batch.rank_scores is not None or group.batch.states.keys() != beams.states.keys():
                return None
        sizes = KernelStepSizes.of(beams, values.shape[1])
        kind = self._key(step, beams, sizes)
        self._times[kind] += 1
        key = *kind, self._times[kind]  # a group's decision stays in place until another's is also on its way
        if (graph := self._graphs.pop(key, None)) is not None:
            self._graphs[key] = graph
            self._replay(graph, step, num_tokens)
        elif self._may_capture and self.hold(step, sizes) and self._is_due(key, step, sizes):
            with pinned_search_tensors() as constants:
                graph = self._new(step, beams, sizes)
                self._replay(graph, step, num_tokens)  # so that the capture compiles and uploads nothing
                self._keep(key, graph)
            graph.used += constants
            while len(self._graphs) > MOST_GRAPHS or self._own_bytes() > MOST_OWN_BYTES:
                del self._graphs[next(iter(self._graphs))]
        else:
            return None
        return SelectedCohort(cohort.group_ids, graph.decided, cohort.layout(values.shape[1]))

    def _keep(self, key: Key, graph: SelectionGraph) -> None:
        """Captures a step that has been taken, so that no failure may end the engine."""
        try:
            graph.replay = self._capture(graph.replay)
            self._graphs[key] = graph
        except torch.OutOfMemoryError:
            pass  # there may be more memory later
        except RuntimeError as error:
            self._may_capture = False
            logger.warning(FAILED, error)

    def _own_bytes(self) -> int:
        """Bytes of all graphs but the newest one."""
        graphs = [*self._graphs.values()][:-1]
        used = {tensor.data_ptr(): tensor.nbytes for graph in graphs for tensor in graph.used}
        return sum(graph.tables.num_bytes + graph.decided.nbytes for graph in graphs) + sum(used.values())

    def hold(self, step: CohortLogits, sizes: KernelStepSizes) -> bool:
        """Whether graphs may contain such steps: of what only the host knows, they may depend on lengths alone."""
        rules, values, (stride, one) = step.cohort.rules, step.values, step.values.stride()
        is_laid_out = values.dtype in self._logits and one == 1 and stride >= sizes.vocab_size
        if not (is_laid_out and self._may_hold(rules)):
            return False
        if self._reads_in_place(step, sizes):
            return step.cohort.index.size * sizes.vocab_size <= self._most_logits
        # Others need more memory in torch than their rows, or come once, because their factor changes with the length.
        is_light_in_torch = rules.constraints == () and rules.strategy in LIGHT_IN_TORCH
        is_light = is_light_in_torch or select_by_kernels(rules, sizes) is not None
        return is_light and step.cohort.index.size * stride <= MOST_COPIED

    def _may_hold(self, rules: SearchRules) -> bool:
        """`hold` as far as rules alone decide it, without a full look at them: a long key takes long to find."""
        has_long_key = len(rules.stops.last_token_ids) > MOST_STOPS
        looks_in_text = rules.stops.may_complete
        reports_much = (rules.num_logprobs or 0) > MOST_PER_ROW
        is_processed = rules.is_controlled and self._rows.has_processors
        return not (has_long_key or looks_in_text or reports_much or is_processed)

    def _reads_in_place(self, step: CohortLogits, sizes: KernelStepSizes) -> bool:
        """Whether a graph reads the logits of a step in place."""
        values = step.values
        is_aligned = values.stride(0) % UNIT == values.data_ptr() % (UNIT * values.itemsize) == 0
        is_by_kernels = select_by_kernels(step.cohort.rules, sizes) is not None
        return is_by_kernels and is_aligned and sizes.vocab_size <= MOST_COPIED

    def _key(self, step: CohortLogits, beams: SearchBeams, sizes: KernelStepSizes) -> Key:
        """What steps that share a graph have in common. The key does not keep a removed catalog alive."""
        cohort, values, along = step.cohort, step.values, cast(ConstraintAlongItems | None, beams.sparse)
        length = None if step.level is None else beams.length
        of_catalog: Key | None = None if along is None else (ref(along.trie), length)
        if along is not None and along.rules.excludes:  # whose tensor moves as it grows
            codes, *lengths = along.trie.closed.for_kernels
            of_catalog = of_catalog, codes.data_ptr(), *lengths
        layout = values.dtype, values.stride(), self._reads_in_place(step, sizes)
        return cohort.rules, cohort.places.shape, cohort.moves, sizes, *layout, of_catalog

    def _is_due(self, key: Key, step: CohortLogits, sizes: KernelStepSizes) -> bool:
        """Whether a step that came is captured now."""
        count = self._seen.get(key, 0) + 1
        self._seen.pop(key, None)
        self._seen[key] = count
        if len(self._seen) > MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        num_logits = step.cohort.index.size * sizes.vocab_size
        is_by_kernels = select_by_kernels(step.cohort.rules, sizes) is not None
        num_bytes = num_logits // LOGITS_OF_BYTE if is_by_kernels else num_logits * BYTES_OF_LOGIT
        # Ever more rarely, where there is no memory, or there are more kinds of steps than graphs to keep: asking for
        # memory waits for the driver, and a capture takes as long as some steps.
        is_asked = count > 1 and count.bit_count() == 1
        return is_asked and self._capture.has_room(num_bytes + MOST_BYTES_WITHOUT_LOGITS)

    def _new(self, step: CohortLogits, beams: SearchBeams, sizes: KernelStepSizes) -> SelectionGraph:
        """The graph to be captured, whose `replay` already works."""
        cohort, values, device = step.cohort, step.values, self._rows.device
        rules, shape, layout = cohort.rules, cohort.places.shape, cohort.layout(sizes.vocab_size)
        stride, own, copied = values.stride(0), self._logits[values.dtype], None
        if self._reads_in_place(step, sizes):
            tables = SelectionGraphTables(shape, stride // UNIT, is_copied=False, device=device)
            in_place = own.as_strided((1, sizes.vocab_size), (UNIT, 1))
        else:  # with the stride that they had: kernels are compiled for it
            tables = SelectionGraphTables(shape, 1, is_copied=True, device=device)
            in_place = copied = own[: cohort.index.size * stride].view(-1, stride)[:, : sizes.vocab_size]
        of_rows = tables.on_device.named_rows
        logits = KernelLogits.of(in_place, of_rows["logits"], rules.stops)._replace(level=step.level)
        by_torch = SelectionStepByTorch(rules, SearchInputs(), slice(None), layout)
        take_rows, along = select_by_kernels(rules, sizes) or by_torch, beams.sparse
        decided = torch.empty(shape[0], layout.num_words, dtype=torch.int32, device=device)
        has_tails = np.ones(cohort.index.size, dtype=np.int64)  # the device finds out which do
        moves, is_controlled = cohort.moves, rules.is_controlled

        def run() -> None:
            states = None if along is None else torch.empty(shape, dtype=torch.int64, device=device)
            carried = KernelBeams(torch.empty(shape, dtype=torch.float32, device=device), states)
            launch_take_up_beams(tables.on_device, carried)
            before = SearchBeams(carried.scores, states={} if along is None or states is None else {along: states})
            going, words, _ = take_rows(logits, before, of_rows["place"], self._newest)
            if moves:
                fork = KVFork(tables.on_device.rows[:4], going.parents.flatten(), has_tails)
                self._rows.fork(fork, is_controlled)
            scores, states = going.beams.scores.contiguous(), None if along is None else going.beams.states[along]
            after = KernelBeams(scores, states)
            launch_put_down_beams(tables.on_device, after, going.tokens.contiguous(), words, decided)

        used = [logits.classes, logits.mixed, *([] if step.level is None else [step.level])]
        return SelectionGraph(run, tables, decided, copied, used)

    def _replay(self, graph: SelectionGraph, step: CohortLogits, num_tokens: np.ndarray) -> None:
        """Takes a step of groups by a graph."""
        cohort, values, moved = step.cohort, step.values, 0
        if graph.copied is None:
            moved = (values.data_ptr() - self._logits[values.dtype].data_ptr()) // (UNIT * values.itemsize)
        else:
            torch.index_select(values, 0, cohort.on_device[0], out=graph.copied)
        width, of_groups = cohort.layout(values.shape[1]).width, []
        for count, group in zip(num_tokens.tolist(), cohort.groups, strict=True):
            held = group.held
            if held is not None and group.batch is held.batch and len(held.tokens) == width:  # as in the last step
                own = *held.carried, *held.next_ones
            else:
                own = put_where_graphs_find_it(group, width)
            of_groups.append((count, moved, *own))
        graph.tables.write(cohort, np.array(of_groups).T)
        graph.replay()
        graph.tables.count_on()
        for group in cohort.groups:
            group.batch, group.place, group.tokens = group.held.batch, 0, group.held.tokens


class SelectionGraphCapture:
    """Captures CUDA graphs, which are replayed one after the other, and so may share their memory pool.

    Args:
        copying: Streams that copy decisions, and the newest tokens.
    """

    def __init__(self, copying: Sequence[torch.cuda.Stream]) -> None:
        self._copying = copying
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None  # kept, because a pool goes with its last graph
        self._latest: torch.cuda.CUDAGraph | None = None  # kept if it fails: torch's allocator may go on to ask it

    def has_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes` of the device's memory are free."""
        free, _ = torch.cuda.mem_get_info()
        return free >= num_bytes

    def wait_for_copies(self) -> None:
        """Lets the device continue once these streams have finished their copies; the host does not wait."""
        for stream in self._copying:
            torch.cuda.current_stream().wait_stream(stream)

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Captures a run that has just been made before; returns its replay. Nothing runs now."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), _garbage_left_by_graphs():
            self._latest = graph
            # `torch.cuda.graph` would wait for the device, and collect garbage.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            self._first = self._first or graph  # also if memory runs out now
            try:
                run()
            finally:
                graph.capture_end()
            self._latest = None
        return graph.replay


@contextmanager
def _garbage_left_by_graphs() -> Iterator[None]:
    """A context without garbage collection, which may free objects by device calls that no capture allows."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
