"""The worker never waits for its device around a step: it runs on tensors without content, as the search does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from tests.support.steps import rules_of
from vllm_trie.messages import GroupStep, NewRows, Resumed
from vllm_trie.search import gumbel, sampling
from vllm_trie.search.beams import Beams
from vllm_trie.search.constraints.catalog import ItemRules, ItemTrie
from vllm_trie.search.constraints.ngrams import NoRepeats
from vllm_trie.search.filters import LogitsFilters, Pruning
from vllm_trie.search.rules import SelectRules
from vllm_trie.search.strategies.drawn import Drawn
from vllm_trie.search.strategies.in_groups import InGroups
from vllm_trie.search.strategies.sampled import SampledEach
from vllm_trie.worker import kernels
from vllm_trie.worker.catalogs import DeviceCatalogs
from vllm_trie.worker.group_rows import BatchRows, GroupRows
from vllm_trie.worker.kv_blocks import KVBlocks, Segments
from vllm_trie.worker.row_reorder import Tables
from vllm_trie.worker.rows import Rows
from vllm_trie.worker.select import Selector
from vllm_trie.worker.step_context import StepContext

NOWHERE = torch.device("meta")
NUM_SLOTS, LENGTH, VOCAB_SIZE, WIDTH, BLOCK_SIZES = 16, 64, 300, 3, (16, 32)
PROMPT = list(range(20))
RULES: dict[str, SelectRules] = {
    "plain": rules_of(WIDTH),
    "controlled": rules_of(WIDTH, "vllm", (1, 2), is_controlled=True),
    "filters": rules_of(WIDTH, stops=(1,), filters=LogitsFilters(0.7, 0.1, 20, 0.9), pruning=Pruning(0.1, 2.0, 0.1, 2)),
    "log-probabilities": rules_of(WIDTH, "tridecode", (1,), num_logprobs=2),
    "along a catalog": rules_of(WIDTH, stops=(1,), constraints=(ItemRules("items", 2, after=7, ends_with_stop=True),)),
    "sampled": rules_of(WIDTH, strategy=SampledEach()),
    "drawn": rules_of(WIDTH, strategy=Drawn(False, 1, None, False)),
    "in groups": rules_of(WIDTH, strategy=InGroups(WIDTH, 0.5, 0)),
    "in groups along a catalog": rules_of(WIDTH, strategy=InGroups(WIDTH, 0.5, 0), constraints=(ItemRules("items"),)),
    "no n-gram twice": rules_of(WIDTH, constraints=(NoRepeats(2),)),
}


class Launches:
    """In the place of a kernel: notes that it was launched."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, grid: object) -> Any:
        def launch(*args: object, **options: object) -> None:
            self.count += 1

        return launch


def nowhere(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor of which nobody can look at the content."""
    return torch.empty(shape, dtype=dtype, device=NOWHERE)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Launches]:
    """As on a GPU, kernels do the work."""
    found = {name: Launches() for name in ("_select_next", "_copy_histories", "_copy_tails")}
    for name, kernel in found.items():
        monkeypatch.setattr(kernels, name, kernel)
    monkeypatch.setattr(kernels, "run_on", lambda _: True)
    for module in (gumbel, sampling):
        monkeypatch.setattr(module, "on_device", lambda *_: None)  # there are no generators without content
    return found


def runner_of(sampler: Any) -> Any:
    states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=nowhere(NUM_SLOTS, LENGTH, dtype=torch.int32)),
        total_len=SimpleNamespace(gpu=nowhere(NUM_SLOTS, dtype=torch.int32)),
        last_sampled_tokens=nowhere(NUM_SLOTS, 1),
        req_id_to_index={str(slot): slot for slot in range(NUM_SLOTS)},
    )
    return SimpleNamespace(device=NOWHERE, model_config=None, req_states=states, sampler=sampler)


def sampler_of() -> Any:
    """vLLM's, which is not ours to test."""
    return SimpleNamespace(
        apply_sampling_params=lambda logits, *args, **options: logits.float(),
        penalties_state=SimpleNamespace(output_bin_counts=nowhere(NUM_SLOTS, VOCAB_SIZE, dtype=torch.int32)),
        logits_processors=[],
    )


def batch_of(slots: np.ndarray) -> Any:
    """One token of each row."""
    count = len(slots)
    return SimpleNamespace(
        num_reqs=count,
        idx_mapping_np=slots,
        cu_num_logits_np=np.arange(count + 1),
        seq_lens_cpu_upper_bound=torch.from_numpy(np.arange(count) % 2 + 25),
        logits_indices=nowhere(count),
        positions=nowhere(count),
        input_ids=nowhere(count, dtype=torch.int32),
    )


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_rows_are_taken_in_selected_and_reordered_without_waiting(
    launches: dict[str, Launches], rules: SelectRules
) -> None:
    sampler = sampler_of()
    runner = runner_of(sampler)
    slots = np.random.default_rng(0).permutation(NUM_SLOTS)[: 2 * WIDTH]
    groups: dict[str, GroupRows] = {}
    for number, own in enumerate(slots.reshape(2, WIDTH)):
        request: Any = SimpleNamespace(prompt_token_ids=PROMPT)
        scores = nowhere(1, WIDTH, dtype=torch.float32)
        groups[str(number)] = GroupRows(request, [str(slot) for slot in own], Beams(scores), nowhere(WIDTH))
    steps = {group_id: GroupStep(rules, selects=True, decodes=True, draw=(3, 5)) for group_id in groups}
    context = StepContext(steps, entered=[*groups], new_tokens_unknown=[*groups], decided_at=None)

    catalogs = DeviceCatalogs(NOWHERE)
    parts = nowhere(41, dtype=torch.int32), nowhere(40, dtype=torch.int32), nowhere(40, dtype=torch.bool)
    catalogs.tries["items"] = ItemTrie(*parts, [8, 5, 2])
    held = Rows(runner)
    selector = Selector(runner, groups, held, catalogs)
    for group in groups.values():
        group.slots = held.slots_of(group.row_ids)
        held.write_first_tokens(group, rules.is_controlled)
    selector.begin(context)
    for group in groups.values():
        states = {key: nowhere(1, WIDTH) for key in selector.row_beams.begin(rules, None)}
        group.beams = group.beams._replace(states=states)
    tables = [nowhere(NUM_SLOTS, LENGTH // size, dtype=torch.int32) for size in BLOCK_SIZES]
    held.tables = Tables(tables, BLOCK_SIZES)
    held.kv_blocks = SimpleNamespace(segments=Segments(nowhere(2, dtype=torch.uint64), nowhere(2), nowhere(2), 99, 8))
    rows = BatchRows(batch_of(slots), NUM_SLOTS)
    logits = nowhere(2 * WIDTH, VOCAB_SIZE, dtype=torch.bfloat16)
    sampled = nowhere(2 * WIDTH, 1)
    (selected,) = selector.select(context, rows, logits, sampled)

    assert selected.group_ids == [*groups]
    assert (selected.packed.device.type, len(selected.packed)) == ("meta", 2)
    assert launches["_copy_histories"].count == launches["_copy_tails"].count == 1


def test_a_look_at_the_device_would_be_seen() -> None:
    for look in (torch.Tensor.item, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.nonzero, bool):
        with pytest.raises((RuntimeError, TypeError)):
            look(nowhere(1))


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("has_mrope", [False, True])
def test_rows_are_made_and_get_their_blocks_without_waiting(is_resumed: bool, has_mrope: bool) -> None:
    runner = runner_of(sampler_of())
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

    request: Any = SimpleNamespace(prompt_token_ids=PROMPT, lora_request=None)
    group = GroupRows(request, ["g", "g#1", "g#2"], Beams(nowhere(1, WIDTH)), nowhere(WIDTH))
    step = GroupStep(RULES["plain"], selects=True, decodes=True)
    blocks = [np.ones((WIDTH, 2), np.int32), np.ones((WIDTH, 1), np.int32)]
    step.rows = NewRows(blocks, np.array([[3, 4], [3, 5]]))
    step.resumed = Resumed([[7, 8]] * WIDTH, [-1.0] * WIDTH) if is_resumed else None
    held = Rows(runner)
    held.kv_blocks = KVBlocks([nowhere(9, 4)], 9)
    held.add_copies([(group, step)])
    assert states.req_id_to_index.keys() == {"g", "g#1", "g#2"}
    group.slots = np.array([states.req_id_to_index[row_id] for row_id in group.row_ids])
    assert counts[:, group.slots[1:]].tolist() == [[2, 2], [1, 1]]
    assert not has_mrope or deltas[group.slots].tolist() == [2, 2, 2]

    step.new_blocks = [np.arange(WIDTH, dtype=np.int32), np.zeros(0, np.int32)]
    held.add_blocks({"g": step}, {"g": group})
    assert counts[:, group.slots].tolist() == [[3, 3, 3], [2, 1, 1]]
