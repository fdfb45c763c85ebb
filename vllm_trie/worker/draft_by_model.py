"""Forests from a draft model, layer by layer: one forward of it for each, for all groups."""

from __future__ import annotations

from functools import cached_property

from vllm_trie.worker.draft import Drafter, Forests
from vllm_trie.worker.draft_model import DraftBatch, DraftModel
from vllm_trie.worker.forest_step import ForestStep, add_layer
from vllm_trie.worker.group_rows import GroupRows, Roots
from vllm_trie.worker.roots import roots_of
from vllm_trie.worker.step_context import StepContext


class ModelDrafts(Drafter):
    """Drafts from the draft model of a runner."""

    @cached_property
    def draft_model(self) -> DraftModel:
        """The runner's."""
        return DraftModel(self._runner)

    def forests(self, context: StepContext, groups: dict[str, GroupRows]) -> Forests:
        """See `Drafter`."""
        drafting = [groups[group_id] for group_id in context.speculating]
        roots = roots_of(self._selector.rows, drafting, [group.num_drafted for group in drafting])
        forests = dict[str, ForestStep]()
        for group_id, group, of_group in zip(context.speculating, drafting, roots, strict=True):
            forests[group_id] = self._make_forest(context.steps[group_id], group, of_group)
            self._note_pending(forests[group_id], of_group)
        self._catch_up(forests)
        for number in range(1, max(forest_step.budget.num_layers for forest_step in forests.values()) + 1):
            self._draft_layer(forests, number)
            self._compare(forests)
        return forests

    def _note_pending(self, forest_step: ForestStep, roots: Roots) -> None:
        """Note what of each beam the draft model has not computed."""
        forest_step.pending, forest_step.group.num_drafted = roots.tokens.tolist(), forest_step.start

    def _catch_up(self, forests: Forests) -> None:
        """Compute with the draft model what plain steps have added, so that only a few tokens are left for each row."""
        num_rows = sum(len(forest_step.pending) for forest_step in forests.values())
        per_row = max(self._runner.max_num_tokens // num_rows, 1)
        for forest_step in forests.values():
            while len(forest_step.pending[0]) > per_row:
                batch = DraftBatch()
                batch.add_pending(forest_step, per_row)
                self.draft_model.forward(batch)
                forest_step.pending = [row[per_row:] for row in forest_step.pending]

    def _draft_layer(self, forests: Forests, number: int) -> None:
        active = [step for step in forests.values() if step.budget.num_layers >= number and step.layer.nodes]
        if not active:
            return
        batch = DraftBatch()
        for forest_step in active:
            if number == 1:
                batch.add_pending(forest_step)
            else:
                batch.add_layer(forest_step)
        add_layer(active, self.draft_model.logits(batch), number)
