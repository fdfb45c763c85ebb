"""Lays out what is drafted for groups that speculate: one forest each, a tree in the row of each beam.

The tree of a beam follows the beam's newest token in the beam's own row, as draft tokens do in vLLM, so that the target
gives logits at each node. Drafts come from `draft_by_model`, `draft_by_head` or `draft_by_lookup`. Next: `verify`, then
`accepted_forest_path`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_trie.messages import GroupStep
from vllm_trie.search.strategies.joint_sampling import JointSamplingStrategy
from vllm_trie.speculation.search.forest import Forest, Layer
from vllm_trie.speculation.worker.forest_step import NO_BLOCK, ForestStep
from vllm_trie.speculation.worker.roots import ForestRoots
from vllm_trie.speculation.worker.sampled_forest import SampledForestStep
from vllm_trie.speculation.worker.searched_forest import SearchedForestStep
from vllm_trie.speculation.worker.tree_rows import DraftTreeRows
from vllm_trie.worker.rank_check import WorkerRankCheck
from vllm_trie.worker.rows.rows import GroupRows
from vllm_trie.worker.select.select import Selector
from vllm_trie.worker.step_context import RunnerStepContext

Forests = dict[str, ForestStep]  # by group
# By strategy; the others have a `SearchedForestStep`.
FORESTS: dict[type, type[ForestStep]] = {JointSamplingStrategy: SampledForestStep}


class Drafter(ABC):
    """Drafts for the groups of one runner; one file per source of drafts.

    Args:
        runner: vLLM's.
        selector: Provides the runner's rows, constraints and catalogs.
        tree_rows: Where drafts are written.
        rank_check: Compares forests between ranks; None: they are not compared.
    """

    def __init__(
        self, runner: GPUModelRunner, selector: Selector, tree_rows: DraftTreeRows, rank_check: WorkerRankCheck | None
    ) -> None:
        self._runner = runner
        self._selector = selector
        self._tree_rows = tree_rows
        self._rank_check = rank_check

    @abstractmethod
    def forests(self, context: RunnerStepContext, groups: dict[str, GroupRows]) -> Forests:
        """A forest for every group with a budget, except groups that it has no drafts for.

        Args:
            context: The step.
            groups: The runner's groups.
        """

    def draft(self, context: RunnerStepContext, groups: dict[str, GroupRows], output: SchedulerOutput) -> Forests:
        """The forests of groups that speculate; adds what their rows compute to `output`."""
        forests = self.forests(context, groups)
        for forest_step in forests.values():
            for row_id, count in zip(forest_step.group.row_ids, forest_step.counts.tolist(), strict=True):
                output.total_num_scheduled_tokens += count - output.num_scheduled_tokens[row_id]
                output.num_scheduled_tokens[row_id] = count
                if count > 1:
                    output.scheduled_spec_decode_tokens[row_id] = [0] * (count - 1)  # see `DraftTreeRows`
        if forests:
            self._tree_rows.write_drafts([*forests.values()])
        return forests

    def compare(self, forests: Forests) -> None:
        """Compares what the ranks drafted, if this was requested.

        Where the host makes forests, before ranks hang in a forward pass over different shapes.
        """
        if self._rank_check is not None:
            drafts = {group_id: forest_step.forest.as_arrays() for group_id, forest_step in forests.items()}
            self._rank_check.compare("drafts", drafts)

    def _make_forest(self, step: GroupStep, group: GroupRows, roots: ForestRoots) -> ForestStep:
        """A forest of a group's roots; must be called in the order of the groups."""
        rows, block_sizes, budget, blocks = self._selector.rows, self._runner.block_tables.block_sizes, step.budget, []
        assert budget is not None
        start = rows.num_computed(group)
        for number, (table, block_size) in enumerate(zip(roots.tables, block_sizes, strict=True)):
            next_blocks, column = budget.next_blocks[number], table.shape[1] - 1
            last = max((start + budget.max_drafts) // block_size, column + bool(next_blocks))
            own = np.full((len(table), last + 1), NO_BLOCK, dtype=np.int32)
            own[:, : column + 1] = table
            own[:, : self._num_skipped(number, start)] = NO_BLOCK  # blocks before the window may be another's by now
            if next_blocks:
                own[:, column + 1] = next_blocks
            blocks.append(own)
        kind = FORESTS.get(type(group.rules.strategy), SearchedForestStep)
        step = replace(step, budget=(budget := kind.affordable(budget, group.rules)))
        forest = Forest(roots.tokens[:, -1].tolist(), budget.max_drafts)
        beams = self._selector.row_beams.before_drafts(group.rules, group, start + 1, budget.num_layers)
        layer = Layer([*range(len(forest.rows))], roots.compete_by, len(forest.rows))
        spare = [list(of_number) for of_number in budget.spare_blocks]
        return kind(step, group, start, block_sizes, forest, layer, blocks, spare, beams.states)

    def _num_skipped(self, number: int, num_computed_tokens: int) -> int:
        """How many blocks before the window of a KV cache group the scheduler no longer holds."""
        spec = self._runner.kv_cache_config.kv_cache_groups[number].kv_cache_spec
        if not isinstance(spec, SlidingWindowSpec):
            return 0
        return max(num_computed_tokens + 1 - spec.sliding_window, 0) // spec.block_size
