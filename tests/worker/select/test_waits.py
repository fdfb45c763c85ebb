"""The worker never waits for its device around a step: it runs on tensors without content, as the search does."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.utils import gpu_sync_debug
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from benchmarks.launch_counter import LaunchCounter
from benchmarks.weightless import (
    BLOCK_SIZES,
    CATALOG,
    LENGTH,
    NOWHERE,
    PROMPT,
    Launches,
    WeightlessStep,
    kernels_noted,
    nowhere,
    runner_of,
)
from benchmarks.weightless_forest import WeightlessForest
from tests.support.steps import rules_of
from vllm_trie.messages import CatalogChanges, GroupStep, NewRows, Resumed, attach_group_messages
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.catalog import ItemConstraint
from vllm_trie.search.constraints.contrast import ContrastConstraint
from vllm_trie.search.constraints.ngrams import NGramConstraint
from vllm_trie.search.constraints.phrase_boosts import PhraseBoostConstraint
from vllm_trie.search.constraints.stops import StopConstraints
from vllm_trie.search.devices import search_constant
from vllm_trie.search.filters import SearchFilters, SearchPruning
from vllm_trie.search.rules import SearchPhase, SearchRules
from vllm_trie.search.strategies.in_groups import DiverseGroupsStrategy
from vllm_trie.search.strategies.joint_sampling import JointSamplingStrategy
from vllm_trie.search.strategies.sampled import RowSamplingStrategy
from vllm_trie.speculation.worker.tree_speculation import TreeSpeculation
from vllm_trie.worker import runner as runner_module
from vllm_trie.worker.kv.kv_caches import KVCaches
from vllm_trie.worker.rows.rows import GroupRows, Rows
from vllm_trie.worker.runner import BeamModelRunner
from vllm_trie.worker.speculation import RunnerSpeculation

NUM_SLOTS, VOCAB_SIZE, WIDTH = 16, 300, 3
RULES: dict[str, SearchRules] = {
    "plain": rules_of(WIDTH),
    "controlled": rules_of(WIDTH, "vllm", (1, 2), is_controlled=True),
    "filters": rules_of(
        WIDTH, stops=(1,), filters=SearchFilters(0.7, 0.1, 20, 0.9), pruning=SearchPruning(0.1, 2.0, 0.1, 2)
    ),
    "log-probabilities": rules_of(WIDTH, "tridecode", (1,), num_logprobs=2),
    "along a catalog": rules_of(
        WIDTH, stops=(1,), constraints=(ItemConstraint(CATALOG, 2, after=7, ends_with_stop=True),)
    ),
    "sampled": rules_of(WIDTH, strategy=RowSamplingStrategy()),
    "jointly sampled": rules_of(WIDTH, strategy=JointSamplingStrategy(False, 1, None, False)),
    "in groups": rules_of(WIDTH, strategy=DiverseGroupsStrategy(WIDTH, 0.5, 0)),
    "in groups along a catalog": rules_of(
        WIDTH, strategy=DiverseGroupsStrategy(WIDTH, 0.5, 0), constraints=(ItemConstraint(CATALOG),)
    ),
    "contrast": rules_of(WIDTH, stops=(1,), constraints=(ContrastConstraint(0.1, 0.5),)),
    "no n-gram twice": rules_of(WIDTH, constraints=(NGramConstraint(2),)),
    "boosted phrases": rules_of(WIDTH, stops=(1,), constraints=(PhraseBoostConstraint.of([([5, 6], 1.0)]),)),
}


@pytest.fixture
def launches() -> Iterator[dict[str, Launches]]:
    """As on a GPU, kernels do the work."""
    with kernels_noted() as noted:
        yield noted


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_rows_are_taken_in_selected_and_reordered_without_waiting(
    launches: dict[str, Launches], rules: SearchRules
) -> None:
    search_constant.cache_clear()  # what is uploaded once is, too, uploaded without waiting
    with LaunchCounter() as counter:
        step = WeightlessStep(rules, 2, VOCAB_SIZE)
        (selected,) = step.select(np.array([25, 26]))
        step.select(np.array([26, 27]))
    assert selected.group_ids == [*step.groups]
    assert (selected.packed.device.type, len(selected.packed)) == ("meta", 2)
    assert launches["_fork_kv_kernel"].count == 2
    assert counter.waits == 0


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("kind", ["plain", "filters", "along a catalog", "no n-gram twice", "boosted phrases"])
def test_a_step_with_forests_waits_for_what_is_accepted_alone(kind: str) -> None:
    """However many layers they have, once for all steps that are taken on them. Then it has long read the forests."""
    with LaunchCounter():
        forest = WeightlessForest(RULES[kind], 2, VOCAB_SIZE, num_layers=2, depth=4)
        forest.take()  # before which the host does not know the rows
    with LaunchCounter() as counter:
        context = forest.take()
    assert [forest_step.num_layers for forest_step in context.forests.values()] == [4, 4]
    assert counter.waits == 1


class Unannounced(LaunchCounter):
    """Counts what vLLM would report as an error with `VLLM_GPU_SYNC_CHECK=error`."""

    @property
    def waits(self) -> int:
        return self._waits

    @waits.setter
    def waits(self, count: int) -> None:
        if not gpu_sync_debug._allow_depth.get():
            self._waits = count


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reports waits, but those that it is told of."""
    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error")


@pytest.mark.usefixtures("launches", "checked")
def test_vllm_is_told_of_the_waits_for_stop_strings() -> None:
    rules = rules_of(WIDTH)._replace(stops=StopConstraints((1,), ("ab",)))
    step = WeightlessStep(rules, 2, VOCAB_SIZE)
    with Unannounced() as counter:
        step.sample(np.array([25, 26]))
    assert counter.waits == 0
    with Unannounced() as counter:
        step.select(np.array([26, 27]))
    assert counter.waits == 1


class Waiting:
    """In the place of what waits for the device: notes whether vLLM is told of it."""

    def __init__(self) -> None:
        self.are_announced: list[bool] = []

    def __call__(self, *_: Any) -> dict[str, Any]:
        self.are_announced.append(gpu_sync_debug._allow_depth.get() > 0)
        return {}


@pytest.mark.usefixtures("launches", "checked")
def test_vllm_is_told_of_the_waits_for_forests_and_catalogs(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting()
    step = WeightlessStep(RULES["plain"], 2, VOCAB_SIZE)
    step.context.forests = dict.fromkeys(step.groups, SimpleNamespace(num_layers=1))
    step.speculation = SimpleNamespace(accept=waiting)
    step.sample(np.array([25, 26]))

    runner: Any = object.__new__(BeamModelRunner)
    for name in ("execute_model", "update_requests"):
        monkeypatch.setattr(GPUModelRunner, name, lambda *_, **__: None)
    drafting = SimpleNamespace(steps={}, gets_blocks=False, speculating=["0"], cannot_draft=False)
    runner.speculator, runner.block_tables = None, SimpleNamespace(apply_staged_writes=lambda: None)
    runner.device = NOWHERE
    runner.speculation, runner.groups, runner.step = TreeSpeculation(runner), {}, drafting
    runner.speculator, runner.speculation.drafter = SimpleNamespace(), SimpleNamespace(draft=waiting)
    runner.update_requests(None)
    runner.catalogs, runner.speculation = SimpleNamespace(apply=waiting), RunnerSpeculation()
    runner._copies_rows, runner.execute_model_state, runner.sampler = False, None, None
    monkeypatch.setattr(runner_module, "RunnerStepContext", lambda: drafting)
    monkeypatch.setattr(runner_module, "expand", lambda output, *_: (output, None))
    output = SchedulerOutput.make_empty()
    attach_group_messages(output, {}, CatalogChanges())
    runner.execute_model(output)
    assert waiting.are_announced == [True] * 3


def test_a_look_at_the_device_would_be_seen() -> None:
    for look in (torch.Tensor.item, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.nonzero, bool):
        with pytest.raises((RuntimeError, TypeError)):
            look(nowhere(1))


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("has_mrope", [False, True])
def test_rows_are_made_and_get_their_blocks_without_waiting(is_resumed: bool, has_mrope: bool) -> None:
    runner = runner_of(NUM_SLOTS, VOCAB_SIZE)
    states, counts = runner.req_states, np.full((2, NUM_SLOTS), 2, np.int32)
    states.free_indices, states.req_id_to_index, states.index_to_req_id = [*range(3, NUM_SLOTS)], {"g": 2}, {2: "g"}
    states.prefill_len = SimpleNamespace(np=np.zeros(NUM_SLOTS, np.int32))
    states.num_computed_prefill_tokens, states.num_computed_tokens_np = np.zeros((2, NUM_SLOTS), np.int32)
    states.num_computed_tokens = SimpleNamespace(gpu=nowhere(NUM_SLOTS, dtype=torch.int32))
    states.draft_tokens = nowhere(NUM_SLOTS, 2)
    tables = [SimpleNamespace(gpu=nowhere(NUM_SLOTS, LENGTH // size, dtype=torch.int32)) for size in BLOCK_SIZES]
    runner.block_tables = SimpleNamespace(block_tables=tables, num_blocks=SimpleNamespace(np=counts))
    runner.max_num_reqs, runner.prompt_logprobs_worker, runner.lora_state = NUM_SLOTS, None, None
    runner.encoder_cache = None
    deltas, positions = np.arange(NUM_SLOTS, dtype=np.int32), nowhere(3 * NUM_SLOTS, LENGTH, dtype=torch.int32)
    parts = {"prefill_delta": SimpleNamespace(np=deltas), "prefill_positions": SimpleNamespace(gpu=positions)}
    runner.model_state = object.__new__(DefaultModelState)
    rope_state = SimpleNamespace(max_num_reqs=NUM_SLOTS, num_dims=3, **parts)
    runner.model_state.rope_state = rope_state if has_mrope else None

    request: Any = SimpleNamespace(prompt_token_ids=PROMPT, prompt_embeds=None, lora_request=None)
    group = GroupRows(request, RULES["plain"], ["g", "g#1", "g#2"], SearchBeams(nowhere(1, WIDTH)), nowhere(WIDTH))
    step = GroupStep(SearchPhase(), selects=True, decodes=True)
    blocks = [np.ones((WIDTH, 2), np.int32), np.ones((WIDTH, 1), np.int32)]
    step.rows = NewRows(blocks, np.array([[3, 4], [3, 5]]))
    histories, scores = np.array([[7, 8]] * WIDTH, np.int32), np.full(WIDTH, -1.0, np.float32)
    step.resumed = Resumed(histories, scores) if is_resumed else None
    held = Rows(runner)
    held.kv = KVCaches([nowhere(9, 4)], 9)
    held.add_copies([(group, step)])
    assert states.req_id_to_index.keys() == {"g", "g#1", "g#2"}
    group.slots = np.array([states.req_id_to_index[row_id] for row_id in group.row_ids])
    assert counts[:, group.slots[1:]].tolist() == [[2, 2], [1, 1]]
    assert not has_mrope or deltas[group.slots].tolist() == [2, 2, 2]

    step.new_blocks = [np.arange(WIDTH, dtype=np.int32), np.zeros(0, np.int32)]
    held.add_blocks({"g": step}, {"g": group})
    assert counts[:, group.slots].tolist() == [[3, 3, 3], [2, 1, 1]]
