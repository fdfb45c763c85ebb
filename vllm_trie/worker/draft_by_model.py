"""Forests from a draft model, layer by layer: one forward of it for each, for all groups."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_trie.worker.draft import MakeForest
from vllm_trie.worker.draft_model import DraftBatch, DraftModel
from vllm_trie.worker.forest_step import ForestStep
from vllm_trie.worker.group_rows import GroupRows
from vllm_trie.worker.rank_check import RankCheck
from vllm_trie.worker.select import Selector
from vllm_trie.worker.step_context import StepContext


class ModelDrafts:
    """A `DraftSource`: the draft model of a runner.

    Args:
        runner: vLLM's, with a draft model.
        selector: Knows the KV blocks of both models.
        rank_check: Compares forests between ranks; None if they are not to be compared.
        draft_model: The runner's by default.
    """

    def __init__(
        self,
        runner: GPUModelRunner,
        selector: Selector,
        rank_check: RankCheck | None,
        draft_model: DraftModel | None = None,
    ) -> None:
        self._runner = runner
        self._selector = selector
        self._rank_check = rank_check
        self.draft_model = draft_model or DraftModel(runner)

    def forests(
        self, context: StepContext, groups: dict[str, GroupRows], make_forest: MakeForest
    ) -> dict[str, ForestStep]:
        """See `DraftSource`."""
        forests = {group_id: make_forest(context.steps[group_id], groups[group_id]) for group_id in context.speculating}
        for forest_step in forests.values():
            self._note_pending(forest_step)
        self._catch_up(forests)
        for number in range(1, max(forest_step.budget.num_layers for forest_step in forests.values()) + 1):
            self._draft_layer(forests, number)
            if self._rank_check is not None:  # before ranks compute forests of different shapes together, and hang
                drafts = {group_id: forest_step.forest.as_arrays() for group_id, forest_step in forests.items()}
                self._rank_check.compare("drafts", drafts)
        return forests

    def _note_pending(self, forest_step: ForestStep) -> None:
        """Note what of each beam the draft model has not computed."""
        group, end = forest_step.group, forest_step.start + 1
        forest_step.pending = self._selector.rows.tokens(group.slots, group.num_drafted, end).tolist()
        group.num_drafted = forest_step.start

    def _catch_up(self, forests: dict[str, ForestStep]) -> None:
        """Compute with the draft model what plain steps have added, so that only a few tokens are left for each row."""
        num_rows = sum(len(forest_step.pending) for forest_step in forests.values())
        per_row = max(self._runner.max_num_tokens // num_rows, 1)
        for forest_step in forests.values():
            while len(forest_step.pending[0]) > per_row:
                batch = DraftBatch()
                batch.add_sequences(forest_step, forest_step.pending, per_row)
                self.draft_model.forward(batch)
                forest_step.pending = [row[per_row:] for row in forest_step.pending]

    def _draft_layer(self, forests: dict[str, ForestStep], number: int) -> None:
        active = [step for step in forests.values() if step.budget.num_layers >= number and step.layer.nodes]
        if not active:
            return
        batch = DraftBatch()
        for forest_step in active:
            if number == 1:
                batch.add_sequences(forest_step, forest_step.pending)
            else:
                batch.add_layer(forest_step)
        logits = torch.split(self.draft_model.logits(batch), [len(forest_step.layer.nodes) for forest_step in active])
        for forest_step, of_nodes in zip(active, logits, strict=True):
            forest_step.add_layer(of_nodes, number)
