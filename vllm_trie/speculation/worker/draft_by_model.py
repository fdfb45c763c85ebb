"""Forests from a draft model: one forward pass per layer, for all groups whose forests grow in the same way."""

from __future__ import annotations

from functools import cached_property

from vllm_trie.search.devices import is_searched_on_host
from vllm_trie.speculation.worker.device_forests import DeviceForests
from vllm_trie.speculation.worker.draft import Drafter, Forests
from vllm_trie.speculation.worker.draft_batch import DraftBatch, DraftInputs
from vllm_trie.speculation.worker.draft_model import DraftModel
from vllm_trie.speculation.worker.forest_step import ForestStep, add_forest_layer
from vllm_trie.speculation.worker.roots import ForestRoots, forest_roots_of
from vllm_trie.speculation.worker.searched_forest import SearchedForestStep
from vllm_trie.worker.rows.rows import GroupRows
from vllm_trie.worker.step_context import RunnerStepContext


class ModelDrafter(Drafter):
    """Drafts from the runner's draft model."""

    @cached_property
    def draft_model(self) -> DraftModel:
        """The runner's draft model."""
        return DraftModel(self._runner)

    def forests(self, context: RunnerStepContext, groups: dict[str, GroupRows]) -> Forests:
        """See `Drafter`."""
        drafting = [groups[group_id] for group_id in context.speculating]
        roots = forest_roots_of(self._selector.rows, drafting, [group.num_drafted for group in drafting])
        forests = dict[str, ForestStep]()
        for group_id, group, of_group in zip(context.speculating, drafting, roots, strict=True):
            forests[group_id] = self._make_forest(context.steps[group_id], group, of_group)
            self._note_pending(forests[group_id], of_group)
        self._catch_up(forests)
        is_seen = is_searched_on_host(self._runner.device)
        unseen: Forests = {
            key: one for key, one in forests.items() if isinstance(one, SearchedForestStep) and not is_seen
        }
        if unseen:
            self._draft_unseen(unseen)
        others = {key: one for key, one in forests.items() if key not in unseen}
        for number in range(1, max((one.budget.num_layers for one in others.values()), default=0) + 1):
            self._draft_layer(others, number)
            self.compare(others)
        return forests

    def _inputs(self, batch: DraftBatch) -> DraftInputs:
        """A batch on the device."""
        return batch.inputs(self._runner.block_tables.block_sizes, self._runner.device)

    def _note_pending(self, forest_step: ForestStep, roots: ForestRoots) -> None:
        """Notes which tokens of each beam the draft model has not computed."""
        forest_step.pending, forest_step.group.num_drafted = roots.tokens.tolist(), forest_step.start

    def _catch_up(self, forests: Forests) -> None:
        """Runs the draft model over what plain steps have added, so that only a few tokens are left for each row."""
        num_rows = sum(len(forest_step.pending) for forest_step in forests.values())
        per_row = max(self._runner.max_num_tokens // num_rows, 1)
        for forest_step in forests.values():
            while len(forest_step.pending[0]) > per_row:
                batch = DraftBatch()
                batch.add_pending(forest_step, per_row)
                self.draft_model.forward(self._inputs(batch))
                forest_step.pending = [row[per_row:] for row in forest_step.pending]

    def _draft_unseen(self, forests: Forests) -> None:
        """Drafts all layers of forests whose shapes the host does not know yet. Waits for nothing."""
        unseen = DeviceForests([*forests.values()], self._runner.block_tables.block_sizes, self._runner.device)
        batch = DraftBatch()
        for forest_step in unseen.forest_steps:
            batch.add_pending(forest_step)
        unseen.draft(self.draft_model.logits(self._inputs(batch)), 1)
        for number in range(1, unseen.num_layers):
            unseen.draft(self.draft_model.logits(unseen.inputs(number)), number + 1)
        unseen.finish()

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
        add_forest_layer(active, self.draft_model.logits(self._inputs(batch)), number)
