"""Forests from a draft model, layer by layer: one forward of it for each, for all groups."""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_trie.worker.draft import MakeForest
from vllm_trie.worker.draft_model import DraftModel
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
    """

    def __init__(self, runner: GPUModelRunner, selector: Selector, rank_check: RankCheck | None) -> None:
        self._runner = runner
        self._selector = selector
        self._rank_check = rank_check
        self.draft_model = DraftModel(runner)

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
                starts = [forest_step.start + 1 - len(row) for row in forest_step.pending]
                of_beams = [table[: len(starts)] for table in forest_step.blocks]
                self.draft_model.logits([row[:per_row] for row in forest_step.pending], starts, of_beams)
                forest_step.pending = [row[per_row:] for row in forest_step.pending]

    def _draft_layer(self, forests: dict[str, ForestStep], number: int) -> None:
        active = [step for step in forests.values() if step.budget.num_layers >= number and step.layer.nodes]
        if not active:
            return
        tokens, starts, rows = list[list[int]](), list[int](), list[list[int]]()
        for forest_step in active:
            forest, nodes = forest_step.forest, forest_step.layer.nodes
            tokens += forest_step.pending if number == 1 else [[forest.tokens[node]] for node in nodes]
            starts += [forest_step.start + number - len(row) for row in tokens[len(starts) :]]
            rows.append([forest.row_of[node] for node in nodes])
        blocks = []
        for of_table in zip(*(forest_step.blocks for forest_step in active), strict=True):
            columns = max(table.shape[1] for table in of_table)
            own = [table[of_group] for table, of_group in zip(of_table, rows, strict=True)]
            blocks.append(np.concatenate([np.pad(table, ((0, 0), (0, columns - table.shape[1]))) for table in own]))
        logits = self.draft_model.logits(tokens, starts, blocks)
        copies = list[tuple[int, int]]()
        for forest_step, of_rows in zip(active, torch.split(logits, list(map(len, rows))), strict=True):
            for fork in forest_step.add_layer(of_rows, number):
                copies += forest_step.fork(fork, number)
        if copies:
            self._selector.rows.kv_blocks.copy(*np.array(copies).T)
