"""A step of speculation on tensors without content: drafted, verified and accepted, but for the forwards of models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from benchmarks.weightless import BLOCK_SIZES, LENGTH, PROMPT, WeightlessStep, batch_of, nowhere
from vllm_trie.messages import GroupStep, SpeculationBudget
from vllm_trie.search.rules import SearchPhase, SearchRules
from vllm_trie.speculation.worker import draft_model
from vllm_trie.speculation.worker.draft_batch import DraftInputs
from vllm_trie.speculation.worker.draft_by_model import ModelDrafter
from vllm_trie.speculation.worker.draft_model import DraftModel
from vllm_trie.speculation.worker.forest_growth import NO_NODE, grown_forests_on_host
from vllm_trie.speculation.worker.grown_forests import GrownForests, forests_grown_together
from vllm_trie.speculation.worker.tree_rows import DraftTreeRows
from vllm_trie.speculation.worker.verify import verify_forests
from vllm_trie.worker.kv.kv_caches import ByToken, KVCaches
from vllm_trie.worker.rows.rows import BatchRows
from vllm_trie.worker.step_context import RunnerStepContext

HIDDEN_SIZE, HEADS, HEAD_SIZE, NUM_BLOCKS = 64, 2, 8, 400


class WeightlessForest(WeightlessStep):
    """Groups of plain searches that speculate with a draft model.

    Args:
        rules: Theirs.
        num_groups: G.
        vocab_size: V.
        num_layers: Of the models together; each KV cache group has as many.
        depth: Layers of a forest.
    """

    def __init__(self, rules: SearchRules, num_groups: int, vocab_size: int, num_layers: int, depth: int) -> None:
        super().__init__(rules, num_groups, vocab_size)
        self.depth, self.vocab_size = depth, vocab_size
        runner, states = self.runner, self.runner.req_states
        tables = self.selector.rows.kv.tables
        runner.block_tables = SimpleNamespace(
            block_tables=[SimpleNamespace(gpu=table.blocks) for table in tables],
            block_sizes=[*BLOCK_SIZES],
            num_blocks=SimpleNamespace(np=np.zeros((len(tables), self.num_slots), np.int32)),
            apply_staged_writes=lambda: None,
        )
        states.num_computed_tokens_np = np.full(self.num_slots, len(PROMPT), np.int32)
        states.draft_tokens, states.apply_staged_writes = nowhere(self.num_slots, depth), lambda: None
        spec = SimpleNamespace(kv_cache_spec=None)
        runner.kv_cache_config = SimpleNamespace(kv_cache_groups=[spec] * len(tables))
        runner.max_num_tokens, runner.speculator = 1 << 13, object.__new__(StandaloneARSpeculator)
        runner.speculator.attn_groups = []
        runner.speculator.model = SimpleNamespace(
            compute_logits=lambda hidden: nowhere(len(hidden), vocab_size, dtype=torch.bfloat16)
        )
        assert isinstance(runner.speculator, DraftModelSpeculator)
        cache = nowhere(NUM_BLOCKS, HEADS, BLOCK_SIZES[0], 2 * HEAD_SIZE, dtype=torch.bfloat16)
        by_token = ByToken(cache.transpose(1, 2), BLOCK_SIZES[:1])  # as FlashAttention has it
        of_groups = [[by_token] * num_layers for _ in tables]
        self.selector.rows.kv = KVCaches([cache] * num_layers, NUM_BLOCKS, of_groups, tables)
        self.tree_rows = DraftTreeRows(runner, self.selector.rows)
        self.drafter = ModelDrafter(runner, self.selector, self.tree_rows, None)
        for group in self.groups.values():
            group.num_drafted = len(PROMPT) - 1

    def take(self) -> RunnerStepContext:
        """Draft, verify and accept all; the next time from there on."""
        width = len(self.groups["0"].row_ids)
        phase, num_drafts = SearchPhase(), self.depth * width
        context = RunnerStepContext(decided_at=self.context.decided_at)
        for group_id in self.groups:
            budget = SpeculationBudget(
                phases=[phase] * self.depth,
                num_layers=self.depth,
                max_drafts=num_drafts,
                draft_width=2 * width,
                next_blocks=[[*range(width)] for _ in BLOCK_SIZES],
                spare_blocks=[[*range(2 * num_drafts)] for _ in BLOCK_SIZES],
            )
            step = GroupStep(phase, selects=True, decodes=True, budget=budget, num_shared=[1] * len(BLOCK_SIZES))
            context.steps[group_id] = step
        row_ids = [row_id for group in self.groups.values() for row_id in group.row_ids]
        output: Any = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(row_ids, 1), total_num_scheduled_tokens=len(row_ids)
        )
        output.scheduled_spec_decode_tokens = {}
        context.forests = forests = self._draft(context, output)
        slots = self.slots.ravel()
        num_nodes = np.array([output.num_scheduled_tokens[str(slot)] for slot in slots], np.int32)
        batch = batch_of(slots, np.full(len(slots), LENGTH))
        starts = np.concatenate([[0], num_nodes.cumsum()]).astype(np.int32)
        batch.cu_num_logits_np = batch.query_start_loc_np = starts
        batch.positions, batch.input_ids = nowhere(int(starts[-1])), nowhere(int(starts[-1]), dtype=torch.int32)
        rows, grown = BatchRows(batch, self.num_slots), forests_grown_together(forests.values())
        assert grown is not None
        for forest_step in forests.values():
            forest_step.trees(rows)
        grown.place(rows, nowhere(len(BLOCK_SIZES), int(starts[-1])))
        grown._words.wait = lambda: _one_path(grown)
        grown.read()
        logits = nowhere(int(starts[-1]), self.vocab_size, dtype=torch.bfloat16)
        sampled, counts = nowhere(len(slots), context.most_steps), np.zeros((2, len(slots)), np.int32)
        paths, context.decided = verify_forests(self.selector, forests, 0.0, rows, logits, counts)
        self.tree_rows.accept(paths, rows.places(np.concatenate([path.slots for path in paths])), sampled)
        self.runner.req_states.num_computed_tokens_np[slots] += context.most_steps
        return context

    def _draft(self, context: RunnerStepContext, output: SchedulerOutput) -> Any:
        make_forest = self.drafter._make_forest

        def in_blocks_of_their_own(*of_group: Any) -> Any:
            forest_step = make_forest(*of_group)
            forest_step.blocks = [np.arange(table.size).reshape(table.shape) for table in forest_step.blocks]
            return forest_step

        with without_forwards(), patch.object(self.drafter, "_make_forest", in_blocks_of_their_own):
            return self.drafter.draft(context, self.groups, output)


def _one_path(grown: GrownForests) -> np.ndarray:
    """What the host would read of forests each of which has grown one node a layer, after its first root."""
    drafted, rows, tables = grown_forests_on_host(np.zeros(grown._growing.words.shape, np.int32), grown._growing)
    drafted[0] = NO_NODE
    for plan in grown.plans:
        for part in plan.parts:
            rows[part.nodes] = plan.first_row
        rows[plan.parts[0].nodes] += np.arange(plan.parts[0].size)
        drafted[0, [part.first for part in plan.parts[1:] if part.size]] = 0
        for table, known in zip(tables, plan.forest_step.blocks, strict=True):
            table[plan.rows, : known.shape[1]] = known
    return np.concatenate([drafted.ravel(), rows, tables.ravel()])


@contextmanager
def without_forwards() -> Iterator[None]:
    """Within it the draft model computes nothing, and vLLM makes no metadata for it."""

    def run(_: DraftModel, inputs: DraftInputs, *args: Any) -> torch.Tensor:
        return nowhere(len(inputs.tokens), HIDDEN_SIZE)

    with ExitStack() as stack:
        for name in ("build_attn_metadata", "build_slot_mappings_by_layer"):
            stack.enter_context(patch.object(draft_model, name, lambda *_, **__: {}))
        stack.enter_context(patch.object(DraftModel, "_run", run))
        yield
