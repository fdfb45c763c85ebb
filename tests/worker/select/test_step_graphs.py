"""What graphs of steps read and write: on a GPU, or by taking the step again where a graph would be replayed."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import ref

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from benchmarks.device_step import DeviceStep, Shape, Sizes, rules_of
from benchmarks.gpu_steps import kernels_on
from tests.support.taken_again import TakenAgain
from vllm_trie.search import token_tables
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.stops import StopConstraints, StopStringConstraint
from vllm_trie.search.filters import SearchFilters, SearchPruning
from vllm_trie.search.rules import SearchInputs, SearchRules
from vllm_trie.search.step import PLAIN
from vllm_trie.search.step_result import NextSearchBeams, PackedSearchStep, SearchResultLayout
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.search.strategies.in_groups import DiverseGroupsStrategy
from vllm_trie.worker.kernels import KernelStepSizes
from vllm_trie.worker.kernels.tiles import KernelLogits
from vllm_trie.worker.runner import BeamModelRunner
from vllm_trie.worker.select import step_graphs
from vllm_trie.worker.select.by_kernels import select_by_kernels
from vllm_trie.worker.select.step_graphs import SelectionGraphCapture, SelectionGraphs
from vllm_trie.worker.speculation import RunnerSpeculation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = Sizes(300, 2, 2, 32)
HELD = ("plain", "many stop tokens", "controlled", "log-probabilities", "min_p and top_p", "in 2 groups of beams")


class Counted(TakenAgain):
    """Captures of graphs, counted; where there is no GPU, what stands in for them."""

    def __init__(self) -> None:
        super().__init__()
        self._capture = SelectionGraphCapture() if DEVICE.type == "cuda" else super().__call__

    def __call__(self, run: Callable[[], PackedSearchStep]) -> tuple[Callable[[], None], PackedSearchStep]:
        self.count += DEVICE.type == "cuda"
        return self._capture(run)


@pytest.fixture(autouse=True)
def on_kernels() -> Iterator[None]:
    with kernels_on(DEVICE):
        yield


def step_with_graphs(shape: Shape) -> tuple[DeviceStep, Counted]:
    step, captures = DeviceStep(shape, SIZES, DEVICE), Counted()
    step.selector.graphs = SelectionGraphs(DEVICE, step.logits.dtype, captures)
    return step, captures


def without_graphs(shape: Shape) -> DeviceStep:
    step = DeviceStep(shape, SIZES, DEVICE)
    step.selector.graphs = None
    return step


def taken_by(step: DeviceStep, logits: torch.Tensor) -> list[torch.Tensor]:
    """What a step decides by these logits, and what it does to rows."""
    step.restore()
    step.logits.copy_(logits)
    words, _ = step.select()
    groups = step.groups.values()
    return [words, *(group.tokens for group in groups), *(group.beams.scores for group in groups), *step.snapshot()]


OTHERS: dict[str, dict[str, Any]] = {  # than `HELD`, of plain beams
    "by the rules of vLLM": {"strategy": BestStrategy("vllm")},
    "by those of the trie paper": {"strategy": BestStrategy("tridecode")},
    "top_k": {"filters": SearchFilters(top_k=5)},
    "pruned": {"pruning": SearchPruning(0.1, 2.0, 0.1, 2)},
    "the last step": {"is_last": True},
    "groups of beams at a temperature": {
        "strategy": DiverseGroupsStrategy(2, 0.5, None),
        "filters": SearchFilters(0.7),
    },
}


def check(step: DeviceStep, without: DeviceStep) -> list[torch.Tensor]:
    """Raise AssertionError unless graphs decide what the step decides, whatever the logits are; from when on it is
    captured, and what was decided before stays as it is."""
    inputs = [step.logits.roll(by, -1) for by in range(4)]
    found = [taken_by(step, logits) for logits in inputs]
    for own, logits in zip(found, inputs, strict=True):
        assert all(map(torch.equal, own, taken_by(without, logits)))
    assert not torch.equal(found[1][0], found[2][0])


@pytest.mark.parametrize("search", HELD)
@pytest.mark.parametrize("batch", [(4, 1, 0), (4, 2, 1)], ids=str)
def test_graphs_decide_what_the_step_decides(search: str, batch: tuple[int, int, int]) -> None:
    step, captures = step_with_graphs(Shape(search, *batch))
    check(step, without_graphs(Shape(search, *batch)))
    assert captures.count == 1


@pytest.mark.parametrize("changed", OTHERS)
def test_so_they_do_by_all_other_rules(changed: str) -> None:
    (step, captures), without = step_with_graphs(Shape("plain", 4)), without_graphs(Shape("plain", 4))
    for one in (step, without):
        (of_group,) = one.groups.values()
        of_group.rules = of_group.rules._replace(**OTHERS[changed])
    check(step, without)
    assert captures.count == 1


def test_of_many_beams_too() -> None:
    (step, captures), without = step_with_graphs(Shape("plain", 70)), without_graphs(Shape("plain", 70))
    check(step, without)
    assert captures.count == 1


def test_rows_lie_as_far_apart_as_they_did() -> None:
    """Vocabularies are padded, and kernels are compiled for that."""
    graphs, seen = SelectionGraphs(DEVICE, torch.bfloat16, Counted()), list[KernelLogits]()
    values, which = torch.rand(5, 320, device=DEVICE).bfloat16()[:, :303], torch.tensor([4, 1], device=DEVICE)
    rules, beams = rules_of("plain", 2, ""), SearchBeams(torch.zeros(1, 2, device=DEVICE))

    def take(logits: KernelLogits, beams: SearchBeams, *_: Any) -> PackedSearchStep:
        seen.append(logits)
        going = NextSearchBeams(*torch.zeros(2, 1, 2, dtype=torch.int64, device=DEVICE), beams.scores + 1)
        return PackedSearchStep(going, logits.values[:, :3].int(), SearchResultLayout(0, 0))

    for _ in range(2):
        taken = graphs.take(rules, KernelLogits.of(values, which), beams, take)
    assert {logits.values.stride() for logits in seen} == {values.stride()} == {(320, 1)}
    assert torch.equal(taken.words, values[which, :3].int())


@pytest.mark.parametrize("search", ["plain", "min_p and top_p"])
def test_newest_tokens_of_rows_go_where_the_rows_are_in_the_batch(search: str) -> None:
    step, captures = step_with_graphs(Shape(search, 3, 2, 1))
    for _ in range(3):
        step.restore()
        sampled = torch.full((len(step.logits), 2), -7, dtype=torch.int64, device=DEVICE)
        batch = step.batch()
        step.selector.select(step.context, step.selector.plan(step.context, batch.batch), step.logits, sampled)
        expected = torch.full_like(sampled, -7)
        for group in step.groups.values():
            expected[torch.from_numpy(batch.places(group.slots)), 0] = group.tokens
        assert torch.equal(sampled, expected)
    assert captures.count == 1


def test_one_graph_serves_all_batches_with_as_many_rows() -> None:
    """Wherever rows are in them."""
    step, captures = step_with_graphs(Shape("plain", 4, 1, 2))
    without = without_graphs(Shape("plain", 4, 1, 2))
    for seed in range(4):
        order = torch.randperm(step._in_batch.size, generator=torch.Generator().manual_seed(seed)).numpy()
        results = []
        for one in (step, without):
            one.restore()
            batch = one.batch().batch
            batch.idx_mapping_np = one._in_batch.ravel()[order]
            plan = one.selector.plan(one.context, batch)
            sampled = torch.zeros(len(one.logits), 1, dtype=torch.int64, device=DEVICE)
            (selected,) = one.selector.select(one.context, plan, one.logits, sampled)
            results.append([selected.packed, sampled])
        assert all(map(torch.equal, *results))
    assert captures.count == 1


def test_few_graphs_are_kept_those_that_were_needed_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that come once displace none of them."""
    monkeypatch.setattr(step_graphs, "MOST_GRAPHS", 2)
    monkeypatch.setattr(step_graphs, "MOST_SEEN", 3)
    step, captures = step_with_graphs(Shape("plain", 4))
    (of_group,) = step.groups.values()

    def take(temperature: float) -> int:
        step.restore()
        of_group.rules = step.rules._replace(filters=SearchFilters(temperature))
        step.select()
        return captures.count

    assert [take(one) for one in (1, 1, 2, 2, 1)] == [0, 1, 1, 2, 2]
    assert [take(one) for one in (3, 4, 5, 6, 2, 1)] == [2] * 6
    assert take(6) == 3  # in the place of 2
    assert [take(one) for one in (1, 6, 2, 3)] == [3, 3, 3, 3]  # neither 2 nor 3 is known any more
    assert take(2) == 4


class Graph:
    """In the place of `torch.cuda.CUDAGraph`: a pool that graphs have used goes with the last of them."""

    users: ClassVar = Counter[object]()

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert pool not in self.users or self.users[pool] > 0, "the pool has gone"
        self.users[pool] += 1
        self._pool = pool

    def capture_end(self) -> None:
        assert not gc.isenabled()

    def replay(self) -> None:
        pass

    def __del__(self) -> None:
        self.users[self._pool] -= 1


def test_the_memory_of_graphs_outlives_all_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("Stream", object), ("stream", nullcontext), ("graph_pool_handle", object)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    capture, nothing = (
        SelectionGraphCapture(),
        PackedSearchStep(NextSearchBeams(*torch.zeros(3, 1)), torch.zeros(1), SearchResultLayout(0, 0)),
    )
    for _ in range(3):
        replay, taken = capture(lambda: nothing)
        assert taken is nothing
        del replay
    assert [*Graph.users.values()] == [1]
    assert gc.isenabled()


def test_where_memory_is_short_steps_are_taken_as_they_were() -> None:
    step, captures = step_with_graphs(Shape("plain", 4))
    without = without_graphs(Shape("plain", 4))
    for has_memory, count in ((False, 0), (False, 0), (False, 0), (True, 1), (False, 1)):
        captures.has_memory = has_memory
        assert all(map(torch.equal, taken_by(step, step.logits.clone()), taken_by(without, step.logits.clone())))
        assert captures.count == count


def test_memory_that_is_not_there_is_asked_for_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    step, captures = step_with_graphs(Shape("plain", 4))
    taken, asked = list[int](), list[int]()
    monkeypatch.setattr(captures, "has_room", lambda _: asked.append(len(taken)))
    for number in range(20):
        taken.append(number)
        step.restore()
        step.select()
    assert asked == [2, 4, 8, 16]
    assert captures.count == 0


def test_what_is_uploaded_once_outlives_its_cache_in_a_graph() -> None:
    """It is there when the graph is captured, too, however long ago the step came first."""
    step, captures = step_with_graphs(Shape("many stop tokens", 4))
    step.select()
    classes = ref(step.rules.stops.classes(step.logits.shape[-1], step.logits.device))
    token_tables.search_token_classes.cache_clear()
    step.restore()
    step.select()
    assert captures.count == 1
    step.selector.forget()
    assert classes() is not None
    step.selector.graphs = None
    assert classes() is None


def test_graphs_hold_nothing_of_many_rows_or_that_does_not_come_again() -> None:
    graphs, plain = SelectionGraphs(DEVICE, torch.bfloat16, Counted()), rules_of("plain", 4, "")

    def hold(
        rules: SearchRules = plain, inputs: SearchInputs = PLAIN, num_rows: int = 1, vocab_size: int = 300, **beams: Any
    ) -> bool:
        logits = KernelLogits.of(torch.empty(1, vocab_size, dtype=torch.bfloat16), torch.zeros(num_rows))
        own = SearchBeams(torch.zeros(1, 1), **beams)
        return graphs.hold(
            rules, inputs, logits, own, select_by_kernels(rules, KernelStepSizes.of(own, vocab_size)) is not None
        )

    assert hold()
    assert hold(num_rows=256)
    assert not hold(num_rows=257)
    for rules, most in ((plain, 16), (plain._replace(filters=SearchFilters(top_p=0.9)), 8)):  # by kernels, by torch
        assert hold(rules, num_rows=most, vocab_size=1 << 18)
        assert not hold(rules, num_rows=most + 1, vocab_size=1 << 18)
    for values in (torch.empty(1, 300).half(), torch.empty(300, 2, dtype=torch.bfloat16).T):
        assert not graphs.hold(
            plain, PLAIN, KernelLogits.of(values, torch.zeros(1)), SearchBeams(torch.zeros(1, 1)), True
        )
    assert not hold(inputs=SearchInputs(draws=[(0, 0)]))
    assert not hold(inputs=SearchInputs(completes=StopStringConstraint(lambda *_: None, torch.zeros(1, 1))))
    assert not hold(rank_scores=torch.zeros(1, 1))
    assert not hold(rules_of("along a catalog", 4, "items"))
    assert not hold(plain._replace(strategy=BestStrategy("vllm", (2, 0.5))))
    for strategy, changed in (
        (DiverseGroupsStrategy(2, 0.5, None), {"num_logprobs": 2}),
        (BestStrategy("vllm"), {"pruning": SearchPruning(0.1)}),
    ):
        assert hold(plain._replace(strategy=strategy))
        assert not hold(plain._replace(strategy=strategy, **changed)), "torch needs more than its logits are"
    assert hold(plain._replace(num_logprobs=128))
    assert not hold(plain._replace(num_logprobs=129))
    assert not hold(plain._replace(num_logprobs=-1))
    assert hold(plain._replace(stops=StopConstraints(tuple(range(64)))))
    assert not hold(plain._replace(stops=StopConstraints(tuple(range(65)))))


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_a_runner_takes_steps_by_graphs_where_its_engine_has_some(
    monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode
) -> None:
    monkeypatch.setattr(GPUModelRunner, "load_model", lambda _: None)
    monkeypatch.setattr(step_graphs, "SelectionGraphCapture", TakenAgain)
    runner: Any = object.__new__(BeamModelRunner)
    runner.device, runner.groups, runner.max_num_reqs = DEVICE, {}, 8
    runner.speculator, runner.pp_handler, runner.speculation = None, None, RunnerSpeculation()
    runner.model, runner.sampler = None, SimpleNamespace(compute_nans=False)
    runner.model_state = object.__new__(DefaultModelState)
    runner.req_states = SimpleNamespace(all_token_ids=SimpleNamespace(gpu=torch.zeros(8, 4, dtype=torch.int32)))
    runner.model_state.rope_state = None
    runner.model_config = SimpleNamespace(dtype=torch.bfloat16, get_vocab_size=lambda: 300)
    runner.compilation_config = SimpleNamespace(cudagraph_mode=mode)
    runner.vllm_config = SimpleNamespace(additional_config={}, model_config=runner.model_config)
    runner.load_model()
    assert isinstance(runner.selector.graphs, SelectionGraphs if mode != CUDAGraphMode.NONE else type(None))
