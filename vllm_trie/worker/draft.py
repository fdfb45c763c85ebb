"""Lay out what is drafted for groups that speculate: a forest each, from a draft model or from lookup, as rows.

Every path from a root of the forest to a leaf is a row with draft tokens, as vLLM has them, so that it gives logits
at each node. The first rows are the beams' own; others get a slot that lasts one step, with lookahead
blocks of its own. Drafts come from `draft_by_model` or `draft_by_lookup`. Next: `verify`, then `accept_path`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_trie.messages import GroupStep
from vllm_trie.search.forest import Forest, Layer
from vllm_trie.search.strategies.drawn import Drawn
from vllm_trie.worker.drawn_forest import DrawnForest
from vllm_trie.worker.forest_step import ForestStep
from vllm_trie.worker.group_rows import GroupRows
from vllm_trie.worker.searched_forest import SearchedForest
from vllm_trie.worker.select import Selector
from vllm_trie.worker.step_context import StepContext

NO_BLOCK = 0

Forests = dict[str, ForestStep]  # by group
FORESTS: dict[type, type[ForestStep]] = {Drawn: DrawnForest}  # by strategy; for others one that is searched
MakeForest = Callable[[GroupStep, GroupRows], ForestStep]


class DraftSource(Protocol):
    """Where drafts come from."""

    def forests(
        self, context: StepContext, groups: dict[str, GroupRows], make_forest: MakeForest
    ) -> dict[str, ForestStep]:
        """A forest for every group with a budget; for none of those that it has no drafts for.

        Args:
            context: The step's.
            groups: Of the runner.
            make_forest: Makes a forest of a group's roots, to be called in the order of the groups.
        """
        ...


class Drafter:
    """Drafts for the groups of one runner.

    Args:
        runner: vLLM's.
        selector: Knows its KV blocks.
        source: Where drafts come from.
    """

    def __init__(self, runner: GPUModelRunner, selector: Selector, source: DraftSource) -> None:
        self._runner = runner
        self._selector = selector
        self.source = source
        self._pads_rows = runner.device.type == "cuda"  # rows of equal length may replay a graph

    def draft(
        self, context: StepContext, groups: dict[str, GroupRows], output: SchedulerOutput
    ) -> dict[str, ForestStep]:
        """The forests of groups that speculate; their rows are added to the runner's slots and to `output`."""
        forests = self.source.forests(context, groups, self._make_forest)
        for group_id, forest_step in forests.items():
            self._add_rows(group_id, forest_step, output)
        self._selector.rows.write_drafts([*forests.values()])
        return forests

    def _make_forest(self, step: GroupStep, group: GroupRows) -> ForestStep:
        rows, tables, budget = self._selector.rows, self._runner.block_tables, step.budget
        assert budget is not None
        start, num_rows = rows.num_computed(group), len(group.slots) + len(budget.spare_rows)
        slots, blocks = rows.upload(group.slots), []
        for number, (table, block_size) in enumerate(zip(tables.block_tables, tables.block_sizes, strict=True)):
            column, next_blocks = start // block_size, budget.next_blocks[number]
            # One column more may be beyond what vLLM's tables take.
            own = np.full((num_rows, column + 1 + bool(next_blocks)), NO_BLOCK, dtype=np.int32)
            own[: len(slots), : column + 1] = table.gpu[slots, : column + 1].cpu().numpy()
            own[:, : self._num_skipped(number, start)] = NO_BLOCK  # what has left the window may be another's by now
            if next_blocks:
                own[: len(slots), column + 1] = next_blocks
            for row, of_row in enumerate(budget.spare_rows, start=len(slots)):
                own[row, column : column + len(of_row[number])] = of_row[number]
            blocks.append(own)
        roots = group.tokens.tolist()
        kind = FORESTS.get(type(step.rules.strategy), SearchedForest)
        step = replace(step, budget=(budget := kind.affordable(budget, len(roots), step.rules)))
        forest = Forest(roots, num_rows, budget.max_tokens)
        beams = self._selector.row_beams.before_drafts(step.rules, group, start + 1, budget.num_layers)
        layer = Layer(list(range(len(roots))), beams.compete_by[0], range(len(roots)))
        return kind(step, group, start, tables.block_sizes, forest, layer, blocks, beams.states)

    def _num_skipped(self, number: int, num_computed_tokens: int) -> int:
        """How many blocks in front of the window of a KV cache group the scheduler holds no longer."""
        spec = self._runner.kv_cache_config.kv_cache_groups[number].kv_cache_spec
        if not isinstance(spec, SlidingWindowSpec):
            return 0
        return max(num_computed_tokens + 1 - spec.sliding_window, 0) // spec.block_size

    def _add_rows(self, group_id: str, forest_step: ForestStep, output: SchedulerOutput) -> None:
        """Give the rows that are no beam's a slot each, and schedule all of them with their drafts."""
        rows = self._selector.rows
        for row in range(forest_step.num_beams, len(forest_step.forest.rows)):
            row_id = f"{group_id}#+{row}"
            forest_step.spare_ids.append(row_id)
            root = forest_step.forest.tokens[forest_step.forest.rows[row][0]]
            blocks = tuple(table[row].tolist() for table in forest_step.blocks)
            rows.add_spare(row_id, root, forest_step.start, blocks)
        forest_step.slots = np.concatenate([forest_step.group.slots, rows.slots_of(forest_step.spare_ids)])
        longest = 1 + forest_step.budget.num_layers
        is_padded = self._pads_rows and longest * len(forest_step.slots) <= forest_step.budget.max_tokens
        row_ids = [*forest_step.group.row_ids, *forest_step.spare_ids]
        for row_id, path in zip(row_ids, forest_step.forest.rows, strict=True):
            length = longest if is_padded else len(path)
            output.total_num_scheduled_tokens += length - output.num_scheduled_tokens.get(row_id, 0)
            output.num_scheduled_tokens[row_id] = length
            if length > 1:
                output.scheduled_spec_decode_tokens[row_id] = [0] * (length - 1)  # see `Rows.write_drafts`
