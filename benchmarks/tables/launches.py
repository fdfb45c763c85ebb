"""What one step of selection asks of a GPU, counted without one: operations, copies, kernels of ours, waits, bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import Bench, Cell, Measured, Setting, Table

VOCAB_SIZE = 151_936  # of Qwen3
MOST_CHILDREN = 256, 240, 200, 180  # by depth, of a catalog of semantic ids
STOP_TOKEN_IDS, DIVERSITY, NUM_LOGPROBS = (2,), 0.5, 5
TEMPERATURE, MIN_P, TOP_P = 0.7, 0.1, 0.9
STOP_STRINGS = ("\n\n",)
PLAIN, SPECULATING = "plain", "speculating"
WIDTHS, IN_ONE_BATCH = (4, 64, 512, 5000), (4, 8)  # beams; beams and groups
WIDE, MANY = 512, 40  # beams; the latter have more drafts a layer than kernels take
LOGIT_BYTES, MEGABYTE = 2, 1e6
NUM_LAYERS, DEPTH = 36, 4  # of models; of a forest
NOT_COUNTED = "-"
FIRST, SECOND, THIRD = 21, 22, 23  # tokens of rows in steps, of which the first one fills caches


def _rules(width: int) -> dict[str, Any]:
    from benchmarks.weightless import CATALOG
    from vllm_trie.search.constraints.catalog import ItemConstraint
    from vllm_trie.search.constraints.stops import StopConstraints
    from vllm_trie.search.filters import SearchFilters
    from vllm_trie.search.rules import SearchRules
    from vllm_trie.search.strategies.best import BestStrategy
    from vllm_trie.search.strategies.in_groups import DiverseGroupsStrategy
    from vllm_trie.search.strategies.joint_sampling import JointSamplingStrategy

    plain = SearchRules(width, BestStrategy(), StopConstraints(STOP_TOKEN_IDS))
    return {
        PLAIN: plain,
        'semantics="vllm"': plain._replace(strategy=BestStrategy("vllm")),
        "controlled": plain._replace(is_controlled=True),
        "log-probabilities": plain._replace(num_logprobs=NUM_LOGPROBS),
        "temperature and min_p": plain._replace(filters=SearchFilters(TEMPERATURE, MIN_P)),
        "min_p and top_p": plain._replace(filters=SearchFilters(min_p=MIN_P, top_p=TOP_P)),
        "stop strings": plain._replace(stops=StopConstraints(STOP_TOKEN_IDS, STOP_STRINGS)),
        "along a catalog": plain._replace(constraints=(ItemConstraint(CATALOG),)),
        "in 2 groups of beams": plain._replace(strategy=DiverseGroupsStrategy(2, DIVERSITY, None)),
        "sampled beams": plain._replace(strategy=JointSamplingStrategy(False, 1, None, False)),
    }


class Counted(NamedTuple):
    """Of one step."""

    operations: int
    copies: int
    kernels: int
    waits: int
    calls: int  # of Python functions of ours
    num_bytes: int = 0  # read and written by operations and kernels, but for those that reorder rows
    most_held: int = 0  # bytes, at a time, besides what was there before

    @property
    def launches(self) -> int:
        return self.operations + self.copies + self.kernels


def counted(search: str, width: int, num_groups: int, num_ordinary: int = 0, is_whole: bool = False) -> Counted:
    """Count one step of groups in one batch, not their first.

    Args:
        search: Of what kind.
        width: Beams of each group.
        num_groups: In the batch.
        num_ordinary: Ordinary rows ahead of each group.
        is_whole: All that happens where vLLM would sample, not the selection with its reorder alone.
    """
    from benchmarks.call_counter import CallCounter
    from benchmarks.launch_counter import LaunchCounter
    from benchmarks.memory_counter import MemoryCounter
    from benchmarks.weightless import WeightlessStep, kernels_noted

    with kernels_noted() as noted:
        groups = WeightlessStep(_rules(width)[search], num_groups, VOCAB_SIZE, num_ordinary, MOST_CHILDREN)
        take: Callable[[np.ndarray], object] = groups.sample if is_whole else groups.select
        with LaunchCounter():
            take(np.full(num_groups, FIRST))
        for kernel in noted.values():
            kernel.count = kernel.num_bytes = 0
        with MemoryCounter() as memory, LaunchCounter() as counter:
            take(np.full(num_groups, SECOND))
        kernels = sum(kernel.count for kernel in noted.values())
        num_bytes = counter.num_bytes + sum(kernel.num_bytes for kernel in noted.values())
        with LaunchCounter(), CallCounter() as calls:
            take(np.full(num_groups, THIRD))
    launched = len(counter.operations), counter.copies, kernels, counter.waits
    return Counted(*launched, calls.num_calls, num_bytes, memory.most)


class CountedByGraphs(NamedTuple):
    """Of one step, where steps are graphs once they have come before."""

    launches: int  # operations and kernels outside of graphs
    uploads: int
    waits: int
    calls: int  # of Python functions of ours
    replays: int
    of_graph: int  # launches that a graph holds


def counted_by_graphs(search: str, width: int, num_groups: int) -> CountedByGraphs:
    """Count one step of groups in one batch, all that happens where vLLM would sample, once graphs hold such steps.

    Args:
        search: Of what kind.
        width: Beams of each group.
        num_groups: In the batch.
    """
    from benchmarks.call_counter import CallCounter
    from benchmarks.launch_counter import LaunchCounter
    from benchmarks.weightless import RecordedGraphs, WeightlessStep, kernels_noted

    with kernels_noted() as noted:
        groups = WeightlessStep(_rules(width)[search], num_groups, VOCAB_SIZE, most_children=MOST_CHILDREN)
        graphs = RecordedGraphs(noted)
        groups.use_graphs(graphs)
        with LaunchCounter():
            for number in (*(FIRST, SECOND, THIRD) * 2, FIRST):  # seen, captured, replayed
                groups.sample(np.full(num_groups, number))
        graphs.replays = 0
        for kernel in noted.values():
            kernel.count = 0
        with LaunchCounter() as counter:
            groups.sample(np.full(num_groups, SECOND))
        kernels, replays = sum(kernel.count for kernel in noted.values()), graphs.replays
        with LaunchCounter(), CallCounter() as calls:
            groups.sample(np.full(num_groups, THIRD))
    launched = len(counter.operations) + kernels, counter.copies, counter.waits
    return CountedByGraphs(*launched, calls.num_calls, replays, max(graphs.launches, default=0))


def counted_forest(width: int, num_groups: int) -> Counted:
    """Count one step of groups that speculate with a draft model, without the forwards; all drafts are accepted."""
    from benchmarks.call_counter import CallCounter
    from benchmarks.launch_counter import LaunchCounter
    from benchmarks.weightless import kernels_noted
    from benchmarks.weightless_forest import WeightlessForest

    with kernels_noted() as noted:
        groups = WeightlessForest(_rules(width)[PLAIN], num_groups, VOCAB_SIZE, NUM_LAYERS, DEPTH)
        with LaunchCounter():
            groups.take()
        for kernel in noted.values():
            kernel.count = 0
        with LaunchCounter() as counter:
            groups.take()
        kernels = sum(kernel.count for kernel in noted.values())
        with LaunchCounter(), CallCounter() as calls:
            groups.take()
    return Counted(len(counter.operations), counter.copies, kernels, counter.waits, calls.num_calls)


def cells(setting: Setting) -> list[Cell]:
    plain = [(PLAIN, width, 1) for width in setting.widths or WIDTHS]
    others = [(search, WIDTHS[0], 1) for search in _rules(WIDTHS[0]) if search != PLAIN]
    wider = [("along a catalog", width, 1) for width in (WIDE, WIDTHS[-1])] + [("sampled beams", *IN_ONE_BATCH)]
    speculating = [(SPECULATING, width, 1) for width in (WIDTHS[0], MANY)] + [(SPECULATING, *IN_ONE_BATCH)]
    return [*plain, (PLAIN, *IN_ONE_BATCH), *others, *wider, *speculating]


def measure(bench: Bench, search: str, width: int, num_groups: int) -> Measured:
    shape = search, width, num_groups
    if search == SPECULATING:
        forest = counted_forest(width, num_groups)
        counts = forest.operations, forest.copies, forest.kernels, NOT_COUNTED, forest.launches, NOT_COUNTED
        of_memory = [NOT_COUNTED] * 3
        row = search, f"{width} x {num_groups}", *counts, forest.waits, forest.calls, *of_memory
        return Measured([(*row, *[NOT_COUNTED] * 3)])
    step = counted(*shape)
    alone, with_ordinary = (counted(*shape, num_ordinary, is_whole=True) for num_ordinary in (0, 1))
    waits = max(step.waits, alone.waits, with_ordinary.waits)
    counts = step.operations, step.copies, step.kernels, step.launches, alone.launches, with_ordinary.launches, waits
    of_logits = width * num_groups * VOCAB_SIZE * LOGIT_BYTES
    of_memory = _megabytes(step.num_bytes), step.num_bytes / of_logits, _megabytes(step.most_held)
    graphs = counted_by_graphs(*shape)
    of_graphs = graphs.launches, graphs.uploads, graphs.calls
    return Measured([(search, f"{width} x {num_groups}", *counts, alone.calls, *of_memory, *of_graphs)])


def _megabytes(num_bytes: int) -> float:
    """Without a fraction, where they are many."""
    return num_bytes / MEGABYTE if num_bytes < 100 * MEGABYTE else round(num_bytes / MEGABYTE)


TABLE = Table(
    "Launches of one step on a GPU, counted without one",
    (
        *("search", "beams x groups", "torch", "copies", "kernels", "in all", "step", "with ordinary rows", "waits"),
        *("calls", "MB", "x logits", "held", "outside graphs", "uploads", "calls by graphs"),
    ),
    cells,
    measure,
    f"a decoding step of groups in one batch, V = {VOCAB_SIZE:,}, bfloat16, one stop token, on "
    "tensors without content: torch: its operations, one each, "
    "even where it runs several kernels (topk, cumsum, cat); views, allocations and what the host computes are "
    "left out, also what pins memory; copies between host and device; kernels of ours; in all: of the selection, "
    "with its reorder; step: all that happens where vLLM would sample, without vLLM's own sampling of ordinary "
    "rows, and its processing of logits; with ordinary rows: the same with one ahead of each group; what is "
    "uploaded once, in a first step, is not counted; waits of the host for the device, in any of these; calls: of "
    "Python functions of ours in such a step, the third, comprehensions among them; a group "
    f"that speculates drafts {DEPTH} layers with a draft model, which the host reads once the target's forward is "
    "launched, takes as many steps and one more, and accepts all drafts: its step is counted, without the forwards of "
    "the models and what attention makes ready for them, after another such step; MB of device memory that the "
    "selection reads and writes, without its reorder, each tensor that an operation or kernel is given counted once, "
    "as large as it is, or as much of it as is looked up, whatever caches spare and what topk and sorts read anew; x "
    "logits: as a multiple of those of all beams in bfloat16, so 1 is a single pass over them; MB held: what the step"
    " allocates at most at a time, without what torch's operations take for themselves; outside graphs: operations and "
    "kernels of a step, all that happens where vLLM would sample, once graphs hold what they can of it; uploads and "
    "calls by graphs: likewise",
)
