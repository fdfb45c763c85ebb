"""Whole steps of selection on a device, as the runner takes them: each equal to the same step by torch on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.autograd import DeviceType

from benchmarks.device_step import DeviceStep, Shape, Sizes
from benchmarks.gpu_kernels import device_us, host_us
from vllm_trie.search.step_result import SearchStepResult, SearchTokenLogprobs, unpack_search_steps
from vllm_trie.worker import launches

TOLERANCE = 1e-4  # of sums of log-probabilities in float32, which devices add up in another order
HOST = torch.device("cpu")
COLUMNS = (
    "search",
    "beams x groups",
    "launches",
    "copies",
    "device, us",
    "launches of a graph",
    "graph, us",
    "host, us",
    "host by graphs, us",
)
NOTE = (
    "`Selector.select` with its reorder, each step equal to torch's on the host, and without a wait; launches and "
    "copies by torch.profiler, time by events; a graph holds step, packing and reorder; host: to launch a step, and "
    "the same where `SelectionGraphs` may hold it"
)

WIDE, WIDEST = 512, 2000  # beams
SMALL = Sizes(300, 2, 2, 32)  # what an interpreter takes
SEARCHES = (
    *("plain", "many stop tokens", 'semantics="vllm"', "controlled", "log-probabilities", "temperature and min_p"),
    *("min_p and top_p", "along a catalog", "in 2 groups of beams"),
)
SHAPES = (
    *(Shape("plain", width) for width in (4, 64, WIDE)),
    Shape("plain", 4, 8),
    Shape("plain", 4, 8, num_ordinary=1),
    *(Shape(search, *batch) for search in SEARCHES[1:] for batch in ((4, 1), (64, 1), (4, 8))),
    *(Shape(search, WIDE) for search in ("along a catalog", 'semantics="vllm"', "log-probabilities")),
    Shape("plain", WIDE, 4),
    *(Shape(search, WIDEST) for search in ("plain", "along a catalog")),
)
SMALL_SHAPES = (*(Shape(search, 4) for search in SEARCHES), Shape("plain", 3, 2, num_ordinary=1))


@contextmanager
def kernels_on(device: torch.device) -> Iterator[None]:
    """Within it kernels do the work; on the host Triton must interpret them."""
    with patch.object(launches, "worker_runs_kernels_on", lambda _: True):
        yield


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Within it torch raises where the host waits for the device."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check(step: DeviceStep, twin: DeviceStep) -> None:
    """Raise AssertionError where a step differs from that of its twin on the host, RuntimeError where it waits."""
    with kernels_on(step.device):
        step.select()  # compiles, and uploads what is kept
        taken = []
        graphs = step.selector.graphs
        for step.selector.graphs in (None, graphs, graphs):  # captured, replayed
            step.restore()
            with no_waits(step.device):
                taken.append(step.select())
    expected_words, expected_layout = twin.select()
    for words, layout in taken:
        assert layout == expected_layout
        found = unpack_search_steps(words.cpu().numpy(), layout)
        for own, expected in zip(found, unpack_search_steps(expected_words.numpy(), expected_layout), strict=True):
            check_same(own, expected)
    if step.selector.graphs is not None:
        check_other_logits(step)
    twin.restore()
    twin.reorder([own.parents for own in found])
    assert all(map(torch.equal, step.histories(), twin.histories())), "rows are reordered otherwise than in torch"
    assert not all(map(torch.equal, twin._initial, twin.state)), "nothing was reordered"


def check_other_logits(step: DeviceStep) -> None:
    """Raise AssertionError unless its graph, once captured, decides by other logits what the step decides."""
    graphs, logits, taken = step.selector.graphs, step.logits.clone(), []
    for step.selector.graphs in (None, graphs):
        step.restore()
        step.logits.copy_(logits.flip(-1))
        with kernels_on(step.device):
            taken.append(step.select()[0])
    assert torch.equal(*taken), "the step's graph does other than the step"
    step.logits.copy_(logits)
    step.restore()
    with kernels_on(step.device):
        step.select()


def check_same(found: SearchStepResult[np.ndarray], expected: SearchStepResult[np.ndarray]) -> None:
    """Raise AssertionError where two steps of a group differ by more than the order of sums."""
    _check_beams("beams", found, expected)
    _check_beams("finished hypotheses", found.finished, expected.finished)
    scores = np.sort(expected.scores)
    if scores.size > 1 and np.diff(scores[scores > -np.inf]).min(initial=1) > 2 * TOLERANCE:
        for name in ("parents", "tokens"):
            assert (getattr(found, name) == getattr(expected, name)).all(), f"{name} lie in other slots"
    for own, theirs in ((found.beam_logprobs, expected.beam_logprobs), (found.top_logprobs, expected.top_logprobs)):
        assert (own is None) == (theirs is None)
        if own is not None and theirs is not None:
            np.testing.assert_allclose(np.sort(own.logprobs), np.sort(theirs.logprobs), atol=TOLERANCE, rtol=0)
            if not isinstance(own, SearchTokenLogprobs):
                for of_row in zip(own.tokens, own.logprobs, theirs.tokens, theirs.logprobs, strict=True):
                    scored = [dict(zip(*of_row[at : at + 2], strict=True)) for at in (0, 2)]
                    _check_scores("reported tokens", *scored)


def _check_beams(name: str, found: Any, expected: Any) -> None:
    """Equal except for what has the last score that is kept."""
    scores = [np.sort(step.scores) for step in (found, expected)]
    assert scores[0].shape == scores[1].shape, f"{name}: other numbers"
    assert np.allclose(*scores, atol=TOLERANCE, rtol=0), f"{name}: other scores"
    own, theirs = (
        {
            (parent, token): score
            for parent, token, score in zip(step.parents, step.tokens, step.scores, strict=True)
            if score > -np.inf
        }
        for step in (found, expected)
    )
    _check_scores(name, own, theirs)


def _check_scores(name: str, own: dict[Any, float], theirs: dict[Any, float]) -> None:
    lowest = min(theirs.values(), default=0.0)
    for one in own.keys() | theirs.keys():
        both = own.get(one, lowest), theirs.get(one, lowest)
        assert abs(both[0] - both[1]) <= TOLERANCE, f"{name}: {one} scores {both[0]}, not {both[1]}"


def profiled(run: Callable[[], object]) -> tuple[int, int]:
    """Kernels and copies that a run launches on a GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == DeviceType.CUDA]
    num_copies = sum(name.startswith("Memcpy") for name in names)
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names), num_copies


def captured(run: Callable[[], torch.Tensor], device: torch.device) -> tuple[Callable[[], object], torch.Tensor]:
    """A run as a CUDA graph, and what it writes; on the host the run itself."""
    if device.type != "cuda":
        kept = run().clone()
        return lambda: kept.copy_(run()), kept
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        words = run()
    return partial(_replay, graph, run), words


def _replay(graph: torch.cuda.CUDAGraph, run: Callable[[], object]) -> None:
    """Replay a run; it is kept as long as the graph is, which reads tensors that only the run holds."""
    graph.replay()


def check_graph(step: DeviceStep) -> Callable[[], object]:
    """A step's graph, which must do what the step does, also with other logits; raises AssertionError else."""
    with kernels_on(step.device):
        run = step.on_device_alone()
        replay, words = captured(run, step.device)
        for logits in (step.static_logits.clone(), step.static_logits.flip(-1)):
            results = []
            for take in (run, replay):
                step.restore()
                step.static_logits.copy_(logits)
                result = take()
                results.append([(words if take is replay else result).clone(), *step.snapshot()])
            assert all(map(torch.equal, *results)), "a graph of the step does other than the step"
    return replay


def measured(shape: Shape, sizes: Sizes, device: torch.device) -> tuple[Any, ...]:
    """A row of `COLUMNS`, all checked; on the host no times."""
    step = DeviceStep(shape, sizes, device)
    check(step, DeviceStep(shape, sizes, HOST))
    replay = check_graph(step)
    name = f"{shape.width} x {shape.num_groups}{' in a batch with others' if shape.num_ordinary else ''}"
    if device.type != "cuda":
        return (shape.search, name, *["-"] * (len(COLUMNS) - 2))

    def whole() -> None:
        step.restore_groups()
        step.select()

    graphs, step.selector.graphs = step.selector.graphs, None
    with kernels_on(device):
        counts = *profiled(whole), device_us([whole]), profiled(replay)[0], device_us([replay]), host_us([whole])
        step.selector.graphs = graphs
        return shape.search, name, *counts, host_us([whole])
