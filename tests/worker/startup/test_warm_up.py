"""Whatever kernel a serving engine launches, in whatever variant, it has launched before it served."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu_worker import Worker

from benchmarks.launch_counter import LaunchCounter
from benchmarks.weightless import CATALOG, NOWHERE, Launches, RecordedGraphs, WeightlessStep, kernels_noted, nowhere
from benchmarks.weightless_forest import WeightlessForest
from tests.support.sharing import Batch, Group
from tests.support.steps import rules_of
from tests.support.sweep import sweep
from tests.worker.attention.trees import TreeBatch, TreeGroup, random_tree
from tests.worker.select.test_waits import RULES
from vllm_trie.options import PLUGIN_NAME
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.catalog import ConstraintTrie, ItemConstraint
from vllm_trie.search.constraints.constraint import Constraint
from vllm_trie.search.filters import SearchFilters
from vllm_trie.search.rules import SearchRules
from vllm_trie.search.strategies.in_groups import DiverseGroupsStrategy
from vllm_trie.speculation.worker.tree_speculation import TreeSpeculation
from vllm_trie.worker.attention import triton_kernels
from vllm_trie.worker.attention.shared_rows import Scoring, SharesAttentionPrefixes
from vllm_trie.worker.gpu_worker import BeamGPUWorker
from vllm_trie.worker.kernels import SLOTS, KernelStepSizes
from vllm_trie.worker.kernels.tiles import KernelLogits
from vllm_trie.worker.kv.kv_caches import ByToken, KVCaches
from vllm_trie.worker.select.by_kernels import select_by_kernels
from vllm_trie.worker.speculation import RunnerSpeculation
from vllm_trie.worker.startup import warm_up as warm_up_module
from vllm_trie.worker.startup.warm_up import warm_up_at_startup

VOCAB_SIZE, MOST_ROWS = 300, 100
ALIGNED = 304  # as a vocabulary is whose rows of logits are aligned
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 6, 2, 32, 16
SCORINGS = {
    "plain": Scoring(0.2),
    "window": Scoring(0.2, window=9),
    "sinks and a soft cap": Scoring(0.2, soft_cap=20.0, sinks=torch.zeros(NUM_HEADS)),
}


class Builder(SharesAttentionPrefixes):
    """Of layers that our kernels compute."""

    takes_trees, splits, may_take = True, False, True
    num_heads_q, num_heads_kv = NUM_HEADS, NUM_KV_HEADS
    takes = by_token = None


def draft_model() -> Any:
    """As far as the warm-up knows it."""
    speculator: Any = object.__new__(StandaloneARSpeculator)
    speculator.hidden_size, speculator.dtype, speculator.attn_groups = HEAD_SIZE, torch.bfloat16, [[]]
    logits = nowhere(1, VOCAB_SIZE, dtype=torch.bfloat16)
    speculator.model = SimpleNamespace(compute_logits=lambda hidden: logits)
    return speculator


def runner_with(
    scorings: dict[str, Scoring],
    has_drafts: bool = True,
    max_beam_width: int | None = None,
) -> Any:
    """As far as the warm-up knows it, with a layer for each of these."""
    step = WeightlessStep(rules_of(2), 1, VOCAB_SIZE)
    states, rows = nowhere(3, BLOCK_SIZE, 8, dtype=torch.float32), step.selector.rows
    rows.kv = KVCaches([states], 3, [[ByToken(states, (BLOCK_SIZE,))]], rows.kv.tables)
    cache = torch.zeros(3, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE, dtype=torch.bfloat16)
    layers = {
        name: SimpleNamespace(impl=SimpleNamespace(scoring=scoring), kv_cache=cache)
        for name, scoring in scorings.items()
    }
    attn_group = SimpleNamespace(layer_names=[*layers], get_metadata_builder=lambda _: Builder())
    options = {PLUGIN_NAME: {} if max_beam_width is None else {"max_beam_width": max_beam_width}}
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=MOST_ROWS), additional_config=options)
    config.speculative_config = object() if has_drafts else None
    runner = SimpleNamespace(
        rows=step.selector.rows,
        req_states=step.runner.req_states,
        sampler=step.runner.sampler,
        model=SimpleNamespace(compute_logits=lambda hidden: nowhere(len(hidden), VOCAB_SIZE, dtype=hidden.dtype)),
        model_config=SimpleNamespace(get_hidden_size=lambda: HEAD_SIZE),
        dtype=torch.bfloat16,
        device=NOWHERE,
        speculator=draft_model() if has_drafts else None,
        vllm_config=config,
        attn_groups=[[attn_group]],
        block_tables=SimpleNamespace(input_block_tables=[torch.zeros(MOST_ROWS, 48, dtype=torch.int32)]),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    runner.speculation = TreeSpeculation(runner) if has_drafts else RunnerSpeculation()
    return runner


def new_variants(noted: dict[str, Launches], warmed: dict[str, set[object]]) -> dict[str, set[object]]:
    return {name: new for name, kernel in noted.items() if (new := kernel.variants - warmed[name])}


@pytest.fixture
def noted() -> Iterator[dict[str, Launches]]:
    with kernels_noted() as launches:
        yield launches


@pytest.fixture(scope="module")
def warmed() -> dict[str, set[object]]:
    with kernels_noted() as launches:
        warm_up_at_startup(runner_with(SCORINGS, has_drafts=True, max_beam_width=MOST_ROWS))
    return {name: kernel.variants for name, kernel in launches.items()}


def test_every_kernel_of_the_package_is_warmed(warmed: dict[str, set[object]]) -> None:
    assert warmed.keys() >= {
        "_select_next_kernel",
        "_fork_kv_kernel",
        "_attend_to_shared_kernel",
        "_attend_to_own_kernel",
    }
    assert all(warmed.values()), (
        f"add these to the `warm_up_kernels` of their modules: {[n for n in warmed if not warmed[n]]}"
    )


@pytest.mark.parametrize("num_ordinary", [0, 1])
@pytest.mark.parametrize("width", [*range(1, 10), 16, 17, 32, 33, 64, MOST_ROWS])
def test_no_width_launches_a_variant_that_was_not_warmed(
    noted: dict[str, Launches], warmed: dict[str, set[object]], width: int, num_ordinary: int
) -> None:
    step = WeightlessStep(rules_of(width, stops=(1,)), 3, VOCAB_SIZE, num_ordinary)
    for number in (24, 25):
        step.sample(np.full(3, number))
    assert noted["_rank_rows_kernel" if width <= SLOTS[-1] else "_rank_blocks_kernel"].count > 0
    assert not new_variants(noted, warmed)


def test_steps_by_graphs_launch_no_variant_that_was_not_warmed(
    noted: dict[str, Launches], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits that a graph reads where they are have rows as far apart as kernels know them to be."""
    monkeypatch.setattr(sys.modules[__name__], "VOCAB_SIZE", ALIGNED)
    warm_up_at_startup(runner_with({}, has_drafts=False, max_beam_width=MOST_ROWS))
    warmed, graphs = {name: set(kernel.variants) for name, kernel in noted.items()}, RecordedGraphs(noted)
    along = rules_of(4)._replace(constraints=(ItemConstraint(CATALOG),))
    reporting = rules_of(4)._replace(num_logprobs=3)
    in_groups = rules_of(4)._replace(strategy=DiverseGroupsStrategy(2, 0.5, None))
    for rules in (rules_of(4), rules_of(MOST_ROWS), along, along._replace(width=MOST_ROWS), reporting, in_groups):
        for num_groups in (1, 3):
            step = WeightlessStep(rules, num_groups, ALIGNED)
            step.use_graphs(graphs)
            for _ in range(3):
                step.sample(np.full(num_groups, 24))
    assert graphs.replays == len(graphs.launches) == 12
    assert not new_variants(noted, warmed)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_no_kind_of_search_launches_a_variant_that_was_not_warmed(
    noted: dict[str, Launches], warmed: dict[str, set[object]], rules: SearchRules
) -> None:
    for is_last in (False, True):
        step = WeightlessStep(rules._replace(is_last=is_last), 2, VOCAB_SIZE)
        step.sample(np.array([25, 26]))
    assert not new_variants(noted, warmed)


@pytest.mark.parametrize("width", [1, 4, 9])
@pytest.mark.parametrize("num_stops", [0, 3])
def test_no_forest_launches_a_variant_that_was_not_warmed(
    noted: dict[str, Launches], warmed: dict[str, set[object]], width: int, num_stops: int
) -> None:
    rules = rules_of(width, stops=tuple(range(1, 1 + num_stops)))
    with LaunchCounter():  # which answers where the host waits
        WeightlessForest(rules, 3, VOCAB_SIZE, num_layers=2, depth=2).take()
    assert noted["_rank_rows_kernel"].count == noted["_tile_max_kernel"].count == 2 + 3
    assert [
        noted[name].count
        for name in ("_draft_nodes_kernel", "_place_draft_nodes_kernel", "_lay_out_forest_nodes_kernel")
    ] == [2, 2, 1]
    launched = (
        "_tile_max_kernel",
        "_rank_rows_kernel",
        "_draft_nodes_kernel",
        "_place_draft_nodes_kernel",
        "_lay_out_forest_nodes_kernel",
        "_select_kernel",
    )
    assert not new_variants({name: noted[name] for name in launched}, warmed)


def take(rules: SearchRules, logits: torch.Tensor, num_rows: int, states: dict[Constraint, torch.Tensor]) -> None:
    """Take a step of a group by kernels, if they take it; in a batch with others, of which some speculate."""
    beams, places = SearchBeams(nowhere(1, num_rows, dtype=torch.float32), states=states), nowhere(2 * num_rows + 1)
    take_step = select_by_kernels(rules, KernelStepSizes.of(beams, VOCAB_SIZE))
    for num_steps in (1, 4) if take_step else ():
        which = KernelLogits.of(logits, places[:num_rows], rules.stops)
        take_step(which, beams, places[num_rows + 1 :], nowhere(99, num_steps))


def logits_of_steps() -> list[torch.Tensor]:
    """Unprocessed ones of a batch, those of a row in it, and processed ones."""
    logits = nowhere(MOST_ROWS, VOCAB_SIZE, dtype=torch.bfloat16)
    return [logits, logits[3:4], logits.float(), logits[3:4].float()]


@pytest.mark.parametrize("num_stops", sweep({str(count): count for count in (0, 1, 3, 250)}, "1", "250"))
def test_no_step_by_kernels_launches_a_variant_that_was_not_warmed(
    noted: dict[str, Launches], warmed: dict[str, set[object]], num_stops: int
) -> None:
    for width, semantics in product([*range(1, 10), 16, 17, 32, 33, 64, MOST_ROWS], ["hf", "tridecode", "vllm"]):
        plain = rules_of(width, semantics, tuple(range(num_stops)))
        others: list[dict[str, Any]] = [{"num_logprobs": count} for count in (0, 1, 9, 40, 128)]
        others.append({"filters": SearchFilters(0.7, 0.1)})
        for own in ({}, {"is_last": True}, {"num_beams": -(-width // 3)}, *others):
            for logits, num_rows in product(logits_of_steps(), {1, width}):
                take(plain._replace(**own), logits, num_rows, {})
    assert noted["_select_kernel"].count > 100
    assert noted["_rank_blocks_kernel"].count > 0
    assert not new_variants(noted, warmed)


@pytest.mark.parametrize("num_stops", sweep({str(count): count for count in (0, 1, 250)}, "1"))
def test_no_step_in_groups_of_beams_launches_a_variant_that_was_not_warmed(
    noted: dict[str, Launches], warmed: dict[str, set[object]], num_stops: int
) -> None:
    for width in (*range(2, 10), 16, 18, 32, 33, 64, MOST_ROWS):
        for number in (count for count in range(2, width + 1) if width % count == 0):
            in_groups = DiverseGroupsStrategy(number, 0.5, *((7, (1,)) if number % 2 else (None, ())))
            for is_last, are_barred in product([False, True], [False, True]):
                rules = rules_of(width, "hf", tuple(range(num_stops)), are_barred, strategy=in_groups, is_last=is_last)
                for logits, num_rows in product(logits_of_steps(), {1, width}):
                    take(rules, logits, num_rows, {})
    assert noted["_select_in_groups_kernel"].count > 100
    assert not new_variants(noted, warmed)


@pytest.mark.parametrize("most_children", sweep({str(most): most for most in (1, 16, 17, 4096, 4097)}, "16", "4097"))
@pytest.mark.parametrize("renormalizes", [False, True])
def test_no_step_along_a_catalog_launches_a_variant_that_was_not_warmed(
    noted: dict[str, Launches], warmed: dict[str, set[object]], most_children: int, renormalizes: bool
) -> None:
    items = ItemConstraint(CATALOG, renormalizes=renormalizes)
    parts = nowhere(41, dtype=torch.int32), nowhere(40, dtype=torch.int32), nowhere(40, dtype=torch.bool)
    along = items.on({CATALOG: ConstraintTrie(*parts, [most_children])}, ())
    for width, semantics in product([*range(1, 10), 16, 17, 32, 33, 64, MOST_ROWS], ["hf", "tridecode", "vllm"]):
        numbers = [(None, None), (-(-width // 3), None), (None, 3 * width + 1)]
        for are_barred, (num_beams, num_ending) in product([False, True], numbers):
            of_phase = {"num_beams": num_beams, "num_ending": num_ending}
            rules = rules_of(width, semantics, (1,), are_barred, constraints=(items,), **of_phase)
            of_levels = [nowhere(width, size, dtype=torch.bfloat16) for size in (64, 192)] if renormalizes else []
            for logits, num_rows in product([*logits_of_steps(), *of_levels], {1, width}):
                take(rules, logits, num_rows, {along: nowhere(1, num_rows)})
    assert noted["_select_kernel"].count > 100
    assert noted["_rank_item_tiles_kernel"].count > 0
    assert not new_variants(noted, warmed)


def test_stages_of_a_pipeline_that_do_not_select_warm_no_step(noted: dict[str, Launches]) -> None:
    runner = runner_with({})
    runner.sampler, runner.speculation = None, RunnerSpeculation()  # pipelines do not speculate
    warm_up_at_startup(runner)
    assert noted["_fork_kv_kernel"].count > noted["_tile_max_kernel"].count == 0


@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
@pytest.mark.parametrize("num_blocks", [1, 5, 16, 33])
def test_no_batch_launches_an_attention_that_was_not_warmed(
    noted: dict[str, Launches], warmed: dict[str, set[object]], scoring: Scoring, num_blocks: int
) -> None:
    """Nor one whose tables have their own columns, as those of drafts do."""
    trees = [random_tree(nodes, nodes) for nodes in (3, 9)]
    of_trees = TreeGroup(2, 0, [BLOCK_SIZE - 9 + len(tree) for tree in trees], [3, 9], trees=trees)
    groups = [Group(3, num_blocks - 1, [1] * 3, [1] * 3)]
    of_heads = NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE
    for batch in (Batch(groups, *of_heads, others=1), TreeBatch([of_trees, *groups], *of_heads)):
        shared = batch.shared
        plan = triton_kernels.TritonAttentionPlan(
            shared, torch.from_numpy(shared.lengths), batch.tables, (NUM_HEADS, NUM_KV_HEADS)
        )
        projected = torch.zeros(len(batch.queries), NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_SIZE, dtype=torch.bfloat16)
        cache = torch.zeros(batch.num_blocks, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE, dtype=torch.bfloat16)
        queries = projected[:, :NUM_HEADS]
        plan.attend(queries, torch.empty(queries.shape, dtype=queries.dtype), cache, scoring)
    assert not new_variants(noted, warmed)


@pytest.mark.parametrize(
    ("has_drafts", "max_beam_width", "widest"),
    [
        (False, None, 128),
        (False, 4, 4),
        (False, 200, 128),
        pytest.param(True, None, 1024, marks=pytest.mark.nightly),
        (True, 99, 128),
    ],
)
def test_as_many_slots_are_warmed_as_a_search_may_have(
    noted: dict[str, Launches], has_drafts: bool, max_beam_width: int | None, widest: int
) -> None:
    """In memory mode, which needs drafts, a search may have more beams than rows."""
    warm_up_at_startup(runner_with({}, has_drafts, max_beam_width))
    assert noted["_select_next_kernel"].count == len(noted["_select_next_kernel"].variants) == widest.bit_length()


def test_layers_without_drafts_are_not_warmed_for_trees(noted: dict[str, Launches]) -> None:
    warm_up_at_startup(runner_with(SCORINGS, has_drafts=False))
    assert noted["_attend_to_own_kernel"].count == len(SCORINGS)


@pytest.mark.parametrize(("changed", "is_used"), [({"splits": True}, False), ({"may_take": False}, False), ({}, True)])
@pytest.mark.parametrize("has_drafts", [False, True])
def test_attention_that_no_step_computes_by_our_kernels_is_not_warmed(
    noted: dict[str, Launches],
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, bool],
    is_used: bool,
    has_drafts: bool,
) -> None:
    """By them steps compute trees, and shared reads where FlashAttention does not."""
    for name, value in changed.items():
        monkeypatch.setattr(Builder, name, value)
    warm_up_at_startup(runner_with(SCORINGS, has_drafts=has_drafts))
    assert (noted["_attend_to_own_kernel"].count > 0) == (is_used or has_drafts)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_worker_warms_up_before_vllm_begins_to_report_what_is_compiled(
    monkeypatch: pytest.MonkeyPatch, is_enabled: bool
) -> None:
    order: list[str] = []
    monkeypatch.setattr(warm_up_module, "warm_up_at_startup", lambda _: order.append("ours"))
    monkeypatch.setattr(Worker, "compile_or_warm_up_model", lambda _: order.append("vLLM's"))
    worker: Any = object.__new__(BeamGPUWorker)
    stock_of_drafts = SimpleNamespace(warm_up_stock=lambda: order.append("vLLM's of drafts"))
    worker.model_runner = SimpleNamespace(speculation=stock_of_drafts)
    worker.vllm_config = SimpleNamespace(kernel_config=SimpleNamespace(enable_jit_warmup=is_enabled))
    worker.compile_or_warm_up_model()
    assert order == (["ours", "vLLM's of drafts", "vLLM's"] if is_enabled else ["vLLM's"])
