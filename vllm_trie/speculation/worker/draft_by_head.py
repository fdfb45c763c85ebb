"""Forests from an EAGLE-3 head: as from a draft model, but it also reads hidden states (see `hidden_states`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from vllm_trie.speculation.worker.draft_batch import DraftBatch
from vllm_trie.speculation.worker.draft_by_model import ModelDrafter
from vllm_trie.speculation.worker.forest_step import ForestStep
from vllm_trie.speculation.worker.head_model import DraftHeadModel
from vllm_trie.speculation.worker.roots import ForestRoots
from vllm_trie.worker.rows.rows import BatchRows, GroupRows


class HeadDrafter(ModelDrafter):
    """Drafts from the runner's head."""

    @cached_property
    def draft_model(self) -> DraftHeadModel:
        """The runner's head, as a draft model."""
        return DraftHeadModel(self._runner, self._tree_rows)

    def _note_pending(self, forest_step: ForestStep, roots: ForestRoots) -> None:
        """As for a draft model; but accepted drafts are computed again, from the target's own states."""
        super()._note_pending(forest_step, roots)
        forest_step.keeps_drafted = False

    def add_first_rows(self, groups: Sequence[GroupRows], rows: BatchRows) -> None:
        """Runs the head over what the target computes in this step for groups of one row. Waits for the device.

        These tokens are prompts and, after a preemption, what all beams of a group have in common. vLLM may compute
        part of a cached prefix only after this. A head of one layer writes KV that depends on no other token's; with
        more layers, fewer drafts may be accepted then.
        """
        if not groups:  # as in a profile run, when there is no KV cache yet
            return
        tables, batch = self._runner.block_tables, DraftBatch()
        for group in groups:
            (slot,) = group.slots
            (place,) = rows.places(group.slots)
            start = int(rows.batch.num_computed_tokens_np[place])
            end = start + int(rows.batch.num_scheduled_tokens[place])
            sizes = zip(tables.block_tables, tables.block_sizes, strict=True)
            blocks = [table.gpu[slot, : -(-end // size)].cpu().numpy()[None] for table, size in sizes]
            (tokens,) = self._selector.rows.tokens(group.slots, start, end).tolist()
            batch.add_sequence(tokens, start)
            batch.blocks.append(blocks)
        self.draft_model.forward(self._inputs(batch))
