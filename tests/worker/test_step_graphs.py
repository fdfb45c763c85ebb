"""What graphs of steps read and write: on a GPU, or by taking the step again where a graph would be replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from benchmarks.device_step import DeviceStep, Shape, Sizes
from benchmarks.gpu_steps import kernels_on
from tests.support.taken_again import TakenAgain
from vllm_trie.search import devices
from vllm_trie.search.beams import Beams
from vllm_trie.search.filters import LogitsFilters
from vllm_trie.search.rules import Means
from vllm_trie.search.step import PLAIN
from vllm_trie.search.strategies.best import Best
from vllm_trie.worker import step_graphs
from vllm_trie.worker.kernels.best import Taken
from vllm_trie.worker.kernels.tiles import RowLogits
from vllm_trie.worker.step_graphs import GraphCapture, StepGraphs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = Sizes(300, 2, 2, 32)
HELD = ("plain", "many stop tokens", "controlled", "log-probabilities", "min_p and top_p", "in 2 groups of beams")


class Counted(TakenAgain):
    """Captures of graphs, counted; where there is no GPU, what stands in for them."""

    def __init__(self) -> None:
        super().__init__()
        self._capture = GraphCapture() if DEVICE.type == "cuda" else super().__call__

    def __call__(self, run: Callable[[], Taken]) -> tuple[Callable[[], None], Taken]:
        self.count += DEVICE.type == "cuda"
        return self._capture(run)


@pytest.fixture(autouse=True)
def by_kernels() -> Iterator[None]:
    with kernels_on(DEVICE):
        yield


def step_with_graphs(shape: Shape) -> tuple[DeviceStep, Counted]:
    step, captures = DeviceStep(shape, SIZES, DEVICE), Counted()
    step.selector.graphs = StepGraphs(DEVICE, step.logits.dtype, captures)
    return step, captures


def taken_by(step: DeviceStep, logits: torch.Tensor) -> list[torch.Tensor]:
    """What a step decides by these logits, and what it does to rows."""
    step.restore()
    step.logits.copy_(logits)
    words, _ = step.select()
    groups = step.groups.values()
    return [words, *(group.tokens for group in groups), *(group.beams.scores for group in groups), *step.snapshot()]


@pytest.mark.parametrize("search", HELD)
@pytest.mark.parametrize("batch", [(4, 1, 0), (4, 2, 1)], ids=str)
def test_graphs_decide_what_the_step_decides(search: str, batch: tuple[int, int, int]) -> None:
    """From the second time on, whatever the logits are; and what they decided before stays as it is."""
    shape = Shape(search, *batch)
    step, captures = step_with_graphs(shape)
    without = DeviceStep(shape, SIZES, DEVICE)
    without.selector.graphs = None
    inputs = [step.logits.roll(by, -1) for by in range(4)]
    found = [taken_by(step, logits) for logits in inputs]
    for own, logits in zip(found, inputs, strict=True):
        assert all(map(torch.equal, own, taken_by(without, logits)))
    assert not torch.equal(found[1][0], found[2][0])
    assert captures.count == 1


@pytest.mark.parametrize("search", ["plain", "min_p and top_p"])
def test_newest_tokens_of_rows_go_where_the_rows_are_in_the_batch(search: str) -> None:
    step, captures = step_with_graphs(Shape(search, 3, 2, 1))
    for _ in range(3):
        step.restore()
        sampled = torch.full((len(step.logits), 2), -7, dtype=torch.int64, device=DEVICE)
        batch = step.batch()
        step.selector.select(step.context, batch, step.logits, sampled)
        expected = torch.full_like(sampled, -7)
        for group in step.groups.values():
            expected[torch.from_numpy(batch.places(group.slots)), 0] = group.tokens
        assert torch.equal(sampled, expected)
    assert captures.count == 1


def test_one_graph_serves_all_batches_with_as_many_rows() -> None:
    """Wherever rows are in them."""
    step, captures = step_with_graphs(Shape("plain", 4, 1, 2))
    without = DeviceStep(Shape("plain", 4, 1, 2), SIZES, DEVICE)
    without.selector.graphs = None
    for seed in range(4):
        order = torch.randperm(step._in_batch.size, generator=torch.Generator().manual_seed(seed)).numpy()
        results = []
        for one in (step, without):
            one.restore()
            batch = one.batch()
            batch._place_of_slot[one._in_batch.ravel()] = order
            sampled = torch.zeros(len(one.logits), 1, dtype=torch.int64, device=DEVICE)
            (selected,) = one.selector.select(one.context, batch, one.logits, sampled)
            results.append([selected.packed, sampled])
        assert all(map(torch.equal, *results))
    assert captures.count == 1


def test_few_graphs_are_kept_those_that_were_needed_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MOST_GRAPHS", 2)
    step, captures = step_with_graphs(Shape("plain", 4))
    rules = [step.rules._replace(num_beams=count) for count in (2, 3, 4)]

    def take(which: int) -> None:
        step.restore()
        (of_group,) = step.context.steps.values()
        of_group.rules = rules[which]
        step.select()

    for which in (0, 0, 1, 1, 0):  # each comes once, then it is captured
        take(which)
    assert captures.count == 2
    take(2)
    take(0)
    assert captures.count == 2
    take(1)  # had to go
    take(1)
    assert captures.count == 3


def test_where_memory_is_short_steps_are_taken_as_they_were() -> None:
    step, captures = step_with_graphs(Shape("plain", 4))
    without = DeviceStep(Shape("plain", 4), SIZES, DEVICE)
    without.selector.graphs = None
    for has_memory, count in ((False, 0), (False, 0), (False, 0), (True, 1), (False, 1)):
        captures.has_memory = has_memory
        assert all(map(torch.equal, taken_by(step, step.logits.clone()), taken_by(without, step.logits.clone())))
        assert captures.count == count


def test_what_is_kept_for_all_outlives_its_cache_in_a_graph() -> None:
    step, _ = step_with_graphs(Shape("many stop tokens", 4))
    for _ in range(2):
        step.restore()
        step.select()
    (graph,) = step.selector.graphs._graphs.values()
    assert any(tensor is devices.constant(step.rules.stops.token_ids, step.logits.device) for tensor in graph.used)


def test_graphs_hold_nothing_of_many_rows_or_that_the_host_alone_knows() -> None:
    graphs, beams = StepGraphs(DEVICE, torch.bfloat16, Counted()), Beams(torch.zeros(1, 1))
    plain, nothing = DeviceStep(Shape("plain", 4), SIZES, DEVICE).rules, torch.empty(1, 300, dtype=torch.bfloat16)

    def hold(rules=plain, means: Means = PLAIN, num_rows: int = 1, logits: torch.Tensor = nothing) -> bool:
        return graphs.hold(rules, means, RowLogits(logits, torch.zeros(num_rows)), beams)

    assert hold()
    assert hold(num_rows=256)
    assert not hold(num_rows=257)
    for rules, most in ((plain, 16), (plain._replace(filters=LogitsFilters(top_p=0.9)), 8)):  # by kernels, by torch
        assert hold(rules, num_rows=most, logits=torch.empty(1, 1 << 18, dtype=torch.bfloat16))
        assert not hold(rules, num_rows=most + 1, logits=torch.empty(1, 1 << 18, dtype=torch.bfloat16))
    assert not hold(logits=nothing.half())
    assert not hold(means=Means(draws=[(0, 0)]))
    along = DeviceStep(Shape("along a catalog", 4), SIZES, DEVICE).rules
    assert along.strategy == Best()
    assert not hold(along)
