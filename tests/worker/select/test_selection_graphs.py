"""What graphs of steps read and write: on a GPU, or by taking the step again where a graph would be replayed."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import ref

import numpy as np
import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from benchmarks.device_step import DeviceStep, Shape, Sizes, rules_of
from benchmarks.gpu_steps import kernels_on
from tests.support.sweep import sweep
from tests.support.taken_again import TakenAgain
from vllm_trie.search import token_tables
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.catalog import ItemConstraint
from vllm_trie.search.constraints.stops import StopConstraints
from vllm_trie.search.filters import SearchFilters, SearchPruning
from vllm_trie.search.rules import SearchRules
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.search.strategies.in_groups import DiverseGroupsStrategy
from vllm_trie.worker.kernels import KernelStepSizes
from vllm_trie.worker.runner import BeamModelRunner
from vllm_trie.worker.select import graph_tables, selection_graphs
from vllm_trie.worker.select.cohort import CohortLogits
from vllm_trie.worker.select.narrow import NarrowLogits, SelectionLogits
from vllm_trie.worker.select.selection_graphs import SelectionGraphCapture, SelectionGraphs
from vllm_trie.worker.speculation import RunnerSpeculation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES, ODD_SIZES = Sizes(304, 2, 2, 32), Sizes(300, 2, 2, 32)  # rows of the latter are not aligned
HELD = ("plain", "many stop tokens", "controlled", "log-probabilities", "min_p and top_p", "in 2 groups of beams")


class Counted(TakenAgain):
    """Captures of graphs, counted; where there is no GPU, what stands in for them."""

    def __init__(self) -> None:
        super().__init__()
        self._capture = SelectionGraphCapture([]) if DEVICE.type == "cuda" else super().__call__

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.count += DEVICE.type == "cuda"
        return self._capture(run)


class Uploads:
    """Counts what is uploaded for graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self._upload = 0, graph_tables.copy_into_for_search
        monkeypatch.setattr(graph_tables, "copy_into_for_search", self)

    def __call__(self, array: np.ndarray, there: torch.Tensor) -> None:
        self.count += 1
        self._upload(array, there)


@pytest.fixture(autouse=True)
def on_kernels() -> Iterator[None]:
    with kernels_on(DEVICE):
        yield


def step_with_graphs(shape: Shape, sizes: Sizes = SIZES) -> tuple[DeviceStep, Counted]:
    step, captures = DeviceStep(shape, sizes, DEVICE), Counted()
    step.use_graphs(captures)
    return step, captures


def without_graphs(shape: Shape, sizes: Sizes = SIZES) -> DeviceStep:
    step = DeviceStep(shape, sizes, DEVICE)
    step.selector.graphs = None
    return step


def selected_by(step: DeviceStep) -> list[torch.Tensor]:
    """What a step decides, and what it does to rows, as the host would get it."""
    words, _ = step.select()
    groups = step.groups.values()
    of_groups = [(group.tokens, group.beams.scores, *group.beams.states.values()) for group in groups]
    return [words.clone(), *(part.clone() for parts in of_groups for part in parts), *step.snapshot()]


def taken_by(step: DeviceStep, logits: torch.Tensor) -> list[torch.Tensor]:
    """The same from the beginning, by these logits."""
    step.restore()
    step.logits.copy_(logits)
    return selected_by(step)


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


def check(step: DeviceStep, without: DeviceStep) -> None:
    """Raise AssertionError unless graphs decide what the step decides, whatever the logits are; the second time it is
    captured."""
    inputs = [step.logits.roll(by, -1) for by in range(3)]
    found = [taken_by(step, logits) for logits in inputs]
    for own, logits in zip(found, inputs, strict=True):
        assert all(map(torch.equal, own, taken_by(without, logits)))
    assert not torch.equal(found[1][0], found[2][0])


@pytest.mark.parametrize("search", sweep(HELD, "controlled"))
def test_graphs_decide_what_the_step_decides(search: str) -> None:
    step, captures = step_with_graphs(Shape(search, 4, 2, 1))
    check(step, without_graphs(Shape(search, 4, 2, 1)))
    assert captures.count == 1


@pytest.mark.parametrize("search", sweep(["plain", "along a catalog"], "plain"))
def test_so_they_do_of_rows_that_are_not_aligned(search: str) -> None:
    step, captures = step_with_graphs(Shape(search, 4), ODD_SIZES)
    check(step, without_graphs(Shape(search, 4), ODD_SIZES))
    assert captures.count == 1


@pytest.mark.parametrize("changed", sweep([*OTHERS], "by the rules of vLLM", "pruned"))
def test_so_they_do_by_all_other_rules(changed: str) -> None:
    (step, captures), without = step_with_graphs(Shape("plain", 4)), without_graphs(Shape("plain", 4))
    for one in (step, without):
        (of_group,) = one.groups.values()
        of_group.rules = of_group.rules._replace(**OTHERS[changed])
    check(step, without)
    assert captures.count == 1


@pytest.mark.nightly
@pytest.mark.parametrize("search", ["plain", "along a catalog"])
def test_of_many_beams_too(search: str) -> None:
    (step, captures), without = step_with_graphs(Shape(search, 70)), without_graphs(Shape(search, 70))
    check(step, without)
    assert captures.count == 1


def one_after_the_other(steps: Sequence[DeviceStep], count: int) -> Iterator[int]:
    """Each of some steps once more, as often, with other logits; histories are longer by a token each time.

    Raises:
        AssertionError: What was decided, or is in rows, differs.
    """
    logits = steps[0].logits.clone()
    for number in range(count):
        for step in steps:
            step.logits.copy_(logits.roll(number, -1))
        yield number
        found, expected = map(selected_by, steps)
        assert all(map(torch.equal, found, expected)), number
        for step in steps:
            step.num_tokens += 1


@pytest.mark.nightly
def test_a_step_like_the_last_one_uploads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where blocks end."""
    uploads, counts = Uploads(monkeypatch), list[int]()
    steps = step_with_graphs(Shape("plain", 3, 2))[0], without_graphs(Shape("plain", 3, 2))
    for _ in one_after_the_other(steps, 9):
        counts.append(uploads.count)
    assert counts[:3] == [0, 0, 1]  # that it is captured
    assert counts[3:] == [2] * 6  # once groups carry what graphs have put there
    lengths = steps[0].num_tokens
    assert (lengths // 16 > (lengths - 9) // 16).all(), "no block has ended"


@pytest.mark.nightly
def test_rows_fork_along_a_catalog_whoever_goes_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some steps are another group's as well, and some are no graph's."""
    uploads, shape = Uploads(monkeypatch), Shape("along a catalog", 3, 2, 1)
    (step, captures), without = step_with_graphs(shape), without_graphs(shape)
    asked = {one: one.context.steps for one in (step, without)}
    for number in range(6):
        logits = step.logits.roll(number, -1)
        for one in (step, without):
            one.restore_groups()
            one.logits.copy_(logits)
            one.context.steps = {name: asked[one][name] for name in (("0", "1") if number % 3 else ("0",))}
        for _ in range(2):  # items have two tokens more
            assert all(map(torch.equal, selected_by(step), selected_by(without))), number
            for one in (step, without):
                one.num_tokens += 1
        for one in (step, without):
            one.num_tokens -= 2
    assert captures.count == 4
    assert uploads.count > captures.count


def test_groups_that_no_graph_took_go_on_by_one() -> None:
    steps = step_with_graphs(Shape("plain", 3, 2))[0], without_graphs(Shape("plain", 3, 2))
    graphs = steps[0].selector.graphs
    for number in one_after_the_other(steps, 6):
        steps[0].selector.graphs = None if number == 3 else graphs


def test_what_beams_compete_by_besides_sums_no_graph_takes_up() -> None:
    (step, captures), without = (
        step_with_graphs(Shape("min_p and top_p", 4)),
        without_graphs(Shape("min_p and top_p", 4)),
    )
    ranked = step._beams["0"]._replace(rank_scores=step._beams["0"].scores.flip(-1))
    for beams, count in ((step._beams["0"], 0), (step._beams["0"], 1), (ranked, 1), (step._beams["0"], 1)):
        for one in (step, without):
            one._beams["0"] = beams
            one.restore()
        assert all(map(torch.equal, selected_by(step), selected_by(without)))
        assert captures.count == count


@pytest.mark.parametrize("width", [3, pytest.param(70, marks=pytest.mark.nightly)])
def test_few_logits_are_read_where_they_are(width: int) -> None:
    """Of a level of a catalog, in another place each time."""
    results, kept = [], []
    for has_graphs in (True, False):
        step = DeviceStep(Shape("along a catalog", width), SIZES, DEVICE)
        if has_graphs:
            captures = Counted()
            step.use_graphs(captures)
        (group,) = step.groups.values()
        renormalised = ItemConstraint(step.rules.constraints[0].catalog, renormalizes=True)
        group.rules = step.rules._replace(constraints=(renormalised,))
        group.beams = step._beams["0"]._replace(states={})
        begun = step.selector.row_beams.begin(group.rules, None)
        states = {key: next(iter(step._beams["0"].states.values())) for key in begun}
        decided = []
        for number in range(3):
            step.restore()
            group.beams = step._beams["0"]._replace(states=states)
            step.context.narrow = {"0"}
            plan = step.selector.plan(step.context, step.batch().batch)
            (level,) = step.selector.levels(plan)
            values = step.logits.roll(number, -1)[:, level].clone()
            kept.append(values)
            logits = SelectionLogits(step.logits[:0], [NarrowLogits(level, values)])
            sampled = step.selector.begin_step(len(step.logits), 1)
            (selected,) = step.selector.select(step.context, plan, logits, sampled)
            decided += [selected.packed.clone(), sampled.clone(), *step.snapshot()]
        results.append(decided)
    assert captures.count == 1
    assert all(map(torch.equal, *results))


def test_rows_lie_as_far_apart_as_they_did() -> None:
    """Vocabularies are padded, and kernels are compiled for that."""
    (step, captures), without = step_with_graphs(Shape("plain", 4)), without_graphs(Shape("plain", 4))
    for one in (step, without):
        one.logits = torch.nn.functional.pad(one.logits, (0, 16))[:, :303]
    check(step, without)
    assert captures.count == 1


def test_what_groups_with_equal_rules_decide_in_one_step_stays_until_it_is_copied() -> None:
    shape, results = Shape("min_p and top_p", 3, 2), []
    for step in (step_with_graphs(shape)[0], without_graphs(shape)):
        step.selector._most_together = 3  # rows: each group for itself
        for _ in range(3):
            step.restore()
            sampled = step.selector.begin_step(len(step.logits), 1)
            plan = step.selector.plan(step.context, step.batch().batch)
            assert len(plan.cohorts) == 2
            selected = step.selector.select(step.context, plan, step.logits, sampled)
        results.append([*(one.packed for one in selected), *step.snapshot()])
    assert all(map(torch.equal, *results))
    assert not torch.equal(*results[0][:2])


def test_no_graph_keeps_a_catalog_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgets(Counted):
        def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
            self.count += 1
            return lambda: None

    step, captures = DeviceStep(Shape("along a catalog", 3), SIZES, DEVICE), Forgets()
    step.use_graphs(captures)
    catalogs = step.selector._catalogs.tries
    trie = ref(next(iter(catalogs.values())))
    for _ in range(2):
        step.restore()
        step.select()
    assert captures.count == 1
    assert trie() is not None
    catalogs.clear()
    step.selector.forget()
    step.groups.clear()
    step._beams.clear()
    gc.collect()
    assert trie() is None


@pytest.mark.parametrize("search", ["plain", "min_p and top_p"])
def test_newest_tokens_of_rows_go_where_the_rows_are_in_the_batch(search: str) -> None:
    step, captures = step_with_graphs(Shape(search, 3, 2, 1))
    for _ in range(3):
        step.restore()
        sampled = step.selector.begin_step(len(step.logits), 1).fill_(-7)
        batch = step.batch()
        step.selector.select(step.context, step.selector.plan(step.context, batch.batch), step.logits, sampled)
        expected = torch.full_like(sampled, -7)
        for group in step.groups.values():
            expected[torch.from_numpy(batch.places(group.slots)), 0] = group.tokens
        assert torch.equal(sampled, expected)
    assert captures.count == 1


def batch_places(step: DeviceStep, batch: Any) -> np.ndarray:
    """Where rows of groups are in a batch."""
    slots = np.concatenate([group.slots for group in step.groups.values()])
    return np.array([[*batch.idx_mapping_np].index(slot) for slot in slots])


@pytest.mark.nightly
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
            sampled = one.selector.begin_step(len(one.logits), 1)
            (selected,) = one.selector.select(one.context, plan, one.logits, sampled)
            results.append([selected.packed, sampled[torch.from_numpy(batch_places(one, batch))]])
        assert all(map(torch.equal, *results))
    assert captures.count == 1


@pytest.mark.nightly
def test_few_graphs_are_kept_those_that_were_needed_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that come once displace none of them."""
    monkeypatch.setattr(selection_graphs, "MOST_GRAPHS", 2)
    monkeypatch.setattr(selection_graphs, "MOST_SEEN", 3)
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
    capture, runs = SelectionGraphCapture([]), list[int]()
    for number in range(3):
        replay = capture(lambda number=number: runs.append(number))
        del replay
    assert runs == [0, 1, 2]
    assert [*Graph.users.values()] == [1]
    assert gc.isenabled()


@pytest.mark.nightly
def test_where_memory_is_short_steps_are_taken_as_they_were() -> None:
    step, captures = step_with_graphs(Shape("plain", 4))
    without = without_graphs(Shape("plain", 4))
    for has_memory, runs_out, count in (
        *((False, False, 0), (True, True, 0), (False, False, 0)),
        *((True, False, 1), (False, False, 1)),
    ):
        captures.has_memory, captures.runs_out = has_memory, runs_out
        assert all(map(torch.equal, taken_by(step, step.logits.clone()), taken_by(without, step.logits.clone())))
        assert captures.count == count


def test_a_step_whose_capture_fails_is_taken_and_no_other_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    (step, captures), without = step_with_graphs(Shape("plain", 4)), without_graphs(Shape("plain", 4))
    warnings = list[str]()
    monkeypatch.setattr(selection_graphs.logger, "warning", lambda text, *args: warnings.append(text % args))

    def fail(_: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    captures._capture = fail
    for number in range(4):  # the second time it is captured, and would be the fourth time
        logits = step.logits.roll(number, -1)
        assert all(map(torch.equal, taken_by(step, logits), taken_by(without, logits)))
    (warning,) = warnings
    assert "not permitted" in warning


@pytest.mark.parametrize("has_memory", [False, True])
def test_steps_that_lose_their_graph_or_get_none_ask_for_it_ever_more_rarely(has_memory: bool) -> None:
    rows: Any = SimpleNamespace(device=DEVICE, all_tokens=torch.zeros(9, 1), has_processors=False)
    captures, asked = Counted(), list[int]()
    captures.has_room = lambda _: asked.append(1) or has_memory  # type: ignore[method-assign]
    graphs, sizes = (
        SelectionGraphs(rows, torch.bfloat16, captures, 1),
        KernelStepSizes.of(SearchBeams(torch.zeros(1, 1)), 9),
    )
    cohort: Any = SimpleNamespace(rules=rules_of("plain", 4, ""), index=np.zeros((1, 4)))
    step = CohortLogits(cohort, torch.zeros(1, 9))
    due = [graphs._is_due(("of this kind",), step, sizes) for _ in range(20)]
    assert [number for number, is_due in enumerate(due, start=1) if is_due] == ([2, 4, 8, 16] if has_memory else [])
    assert len(asked) == 4


def test_what_is_uploaded_once_outlives_its_cache_in_a_graph() -> None:
    step, captures = step_with_graphs(Shape("many stop tokens", 4))
    for _ in range(2):
        step.restore()
        step.select()
    assert captures.count == 1
    classes = ref(step.rules.stops.classes(step.logits.shape[-1], step.logits.device))
    token_tables.search_token_classes.cache_clear()
    step.selector.forget()
    assert classes() is not None
    step.selector.graphs = step.selector.begin_step = None
    gc.collect()  # what stands in for a graph keeps what it runs
    assert classes() is None


def test_graphs_hold_nothing_that_is_too_large_or_does_not_come_again() -> None:
    rows: Any = SimpleNamespace(device=DEVICE, all_tokens=torch.zeros(9, 1), has_processors=False)
    graphs, plain = SelectionGraphs(rows, torch.bfloat16, Counted(), 10 << 18), rules_of("plain", 4, "")

    def hold(rules: SearchRules = plain, num_rows: int = 1, values: torch.Tensor | None = None) -> bool:
        own = SearchBeams(torch.zeros(1, 1))
        values = torch.empty(1, 304, dtype=torch.bfloat16) if values is None else values
        cohort: Any = SimpleNamespace(rules=rules, index=np.zeros((1, num_rows)))
        return graphs.hold(CohortLogits(cohort, values), KernelStepSizes.of(own, values.shape[1]))

    assert hold()
    wide = torch.empty(1, 1 << 18, dtype=torch.bfloat16)
    for rules, most in ((plain, 10), (plain._replace(filters=SearchFilters(top_p=0.9)), 8)):  # by kernels, by torch
        assert hold(rules, most, wide)
        assert not hold(rules, most + 1, wide)
    for values in (torch.empty(1, 304).half(), torch.empty(304, 2, dtype=torch.bfloat16).T):
        assert not hold(values=values)
    assert not hold(plain._replace(stops=StopConstraints((1,), ("a",))))
    assert hold(controlled := rules_of("controlled", 4, ""))
    rows.has_processors = True
    assert not hold(controlled)
    assert hold()
    assert hold(rules_of("along a catalog", 4, "items"))
    several = ItemConstraint("items", 2)
    assert not hold(plain._replace(constraints=(several,)))
    assert not hold(plain._replace(strategy=BestStrategy("vllm", (2, 0.5))))
    for strategy, changed in (
        (DiverseGroupsStrategy(2, 0.5, None), {"num_logprobs": 2}),
        (BestStrategy("vllm"), {"pruning": SearchPruning(0.1)}),
    ):
        assert hold(plain._replace(strategy=strategy))
        assert not hold(plain._replace(strategy=strategy, **changed)), "torch needs more than its logits are"
    assert hold(plain._replace(num_logprobs=128))
    assert not hold(plain._replace(num_logprobs=129))
    assert hold(plain._replace(stops=StopConstraints(tuple(range(64)))))
    assert not hold(plain._replace(stops=StopConstraints(tuple(range(65)))))


def test_newest_tokens_of_the_last_step_are_copied_before_others_take_their_place() -> None:
    rows: Any = SimpleNamespace(device=DEVICE, all_tokens=torch.zeros(9, 1))
    captures = Counted()
    graphs = SelectionGraphs(rows, torch.bfloat16, captures, 1)
    first = graphs.begin_step(5, 1)
    assert (first.shape, captures.waits) == ((5, 1), 1)
    assert graphs.begin_step(5, 1) is first
    assert graphs.begin_step(9, 1).data_ptr() == first.data_ptr()
    assert captures.waits == 3
    assert torch.equal(graphs.begin_step(5, 2), torch.zeros(5, 2, dtype=torch.int64, device=DEVICE))


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_a_runner_takes_steps_by_graphs_where_its_engine_has_some(
    monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode
) -> None:
    monkeypatch.setattr(GPUModelRunner, "load_model", lambda _: None)
    monkeypatch.setattr(selection_graphs, "SelectionGraphCapture", lambda _: TakenAgain())
    runner: Any = object.__new__(BeamModelRunner)
    runner.device, runner.groups, runner.max_num_reqs = DEVICE, {}, 8
    runner.speculator, runner.pp_handler, runner.speculation = None, None, RunnerSpeculation()
    runner.output_copy_stream = None
    runner.model, runner.sampler = None, SimpleNamespace(compute_nans=False)
    runner.model_state = object.__new__(DefaultModelState)
    runner.req_states = SimpleNamespace(all_token_ids=SimpleNamespace(gpu=torch.zeros(8, 4, dtype=torch.int32)))
    runner.model_state.rope_state = None
    runner.model_config = SimpleNamespace(dtype=torch.bfloat16, get_vocab_size=lambda: 300)
    runner.compilation_config = SimpleNamespace(cudagraph_mode=mode)
    runner.vllm_config = SimpleNamespace(additional_config={}, model_config=runner.model_config)
    runner.load_model()
    assert isinstance(runner.selector.graphs, SelectionGraphs if mode != CUDAGraphMode.NONE else type(None))


def test_the_memory_of_graphs_stays_theirs_if_it_runs_out_in_the_first_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives it up with the last graph that was captured into it, after which nothing can be."""
    into = list[object]()

    class Graph:
        def capture_begin(self, pool: object, **_: Any) -> None:
            assert not into or any(kept() is not None for kept in graphs), "a pool that is gone"
            into.append(pool)

        def capture_end(self) -> None: ...

        def replay(self) -> None: ...

    def graph() -> Graph:
        new = Graph()
        graphs.append(ref(new))
        return new

    graphs = list[ref[Graph]]()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    capture = SelectionGraphCapture([])

    def run_out() -> None:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        capture(run_out)
    capture(lambda: None)
    assert into[0] is into[1]


def test_torch_may_go_on_to_ask_a_graph_whose_capture_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its allocator asks each graph that it allocates for whether a stream is being captured into it."""

    class Invalidated(Graph):
        def capture_end(self) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    for name, value in (("Stream", object), ("stream", nullcontext), ("graph_pool_handle", object)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Invalidated)
    monkeypatch.setattr(Graph, "users", Counter[object]())
    capture = SelectionGraphCapture([])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="previous error"):
            capture(lambda: None)
    gc.collect()
    assert [*Graph.users.values()] == [2]
    assert gc.isenabled()
