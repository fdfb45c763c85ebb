"""Forests from an EAGLE-3 head: as from a draft model, but it also reads the hidden states (see `hidden_states`)."""

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
    """Drafts from the head of a runner."""

    @cached_property
    def draft_model(self) -> DraftHeadModel:
        """The head."""
        return DraftHeadModel(self._runner, self._tree_rows)

    def _note_pending(self, forest_step: ForestStep, roots: ForestRoots) -> None:
        """As of a draft model; but drafts that are accepted are computed anew, beside the target's own states."""
        super()._note_pending(forest_step, roots)
        forest_step.keeps_drafted = False

    def add_first_rows(self, groups: Sequence[GroupRows], rows: BatchRows) -> None:
        """Compute what the target has computed in this step of groups that are one row yet. Waits for the device.

        These are their prompts, and after a preemption what all their beams have in common. Of a prefix that they found
        in the cache, vLLM may compute some only after this. A head of one layer writes KV that depends on no other's;
        of one with more layers fewer drafts may be accepted then.
        """
        if not groups:  # as in a profile, when there is no KV cache yet
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
        self.draft_model.forward(batch)
