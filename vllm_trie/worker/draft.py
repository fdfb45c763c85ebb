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
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_trie.messages import GroupStep
from vllm_trie.search.forest import Forest, Layer, affordable
from vllm_trie.search.sampling import generator
from vllm_trie.search.strategies.drawn import Drawn
from vllm_trie.worker.forest_step import ForestStep
from vllm_trie.worker.rows import GroupRows
from vllm_trie.worker.select import Selector
from vllm_trie.worker.step_context import StepContext

NO_BLOCK = 0

Plant = Callable[[GroupStep, GroupRows], ForestStep]


class DraftSource(Protocol):
    """Where drafts come from."""

    def forests(self, context: StepContext, groups: dict[str, GroupRows], plant: Plant) -> dict[str, ForestStep]:
        """A forest for every group with a budget; for none of those that it has no drafts for.

        Args:
            context: The step's.
            groups: Of the runner.
            plant: Makes a forest of a group's roots, to be called in the order of the groups.
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
        forests = self.source.forests(context, groups, self._plant)
        for group_id, forest_step in forests.items():
            self._add_rows(group_id, forest_step, output)
        self._runner.req_states.apply_staged_writes()
        self._runner.block_tables.apply_staged_writes()
        for forest_step in forests.values():
            self._write_drafts(forest_step)
        return forests

    def _plant(self, step: GroupStep, group: GroupRows) -> ForestStep:
        runner, budget = self._runner, step.budget
        assert budget is not None
        states, tables = runner.req_states, runner.block_tables
        start, num_rows = int(states.num_computed_tokens_np[group.slots[0]]), len(group.slots) + len(budget.spare_rows)
        slots, blocks = async_tensor_h2d(group.slots, device=runner.device, dtype=torch.int64), []
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
        if isinstance(step.rules.strategy, Drawn):
            room = len(roots), num_rows, budget.max_tokens
            num_layers, draft_width = affordable(*room, budget.num_layers, budget.draft_width, step.rules.width)
            budget = replace(budget, num_layers=num_layers, draft_width=draft_width)
        forest = Forest(roots, num_rows, budget.max_tokens)
        beams = self._selector.row_beams.before_drafts(step.rules, group, start + 1, budget.num_layers)
        layer = Layer(list(range(len(roots))), beams.compete_by[0], range(len(roots)))
        rng = None if step.draw is None else generator(*step.draw)
        return ForestStep(step, budget, group, start, tables.block_sizes, forest, layer, blocks, rng, beams.states)

    def _num_skipped(self, number: int, num_computed_tokens: int) -> int:
        """How many blocks in front of the window of a KV cache group the scheduler holds no longer."""
        spec = self._runner.kv_cache_config.kv_cache_groups[number].kv_cache_spec
        if not isinstance(spec, SlidingWindowSpec):
            return 0
        return max(num_computed_tokens + 1 - spec.sliding_window, 0) // spec.block_size

    def _add_rows(self, group_id: str, forest_step: ForestStep, output: SchedulerOutput) -> None:
        """Give the rows that are no beam's a slot each, and schedule all of them with their drafts."""
        runner, states = self._runner, self._runner.req_states
        for row in range(forest_step.num_beams, len(forest_step.forest.rows)):
            row_id = f"{group_id}#+{row}"
            forest_step.spare_ids.append(row_id)
            root = forest_step.forest.tokens[forest_step.forest.rows[row][0]]
            # Its tokens are read from nowhere else.
            states.add_request(row_id, 1, [root], forest_step.start, max_tokens=1)
            block_ids = tuple(table[row].tolist() for table in forest_step.blocks)
            runner.block_tables.append_block_ids(states.req_id_to_index[row_id], block_ids, overwrite=True)
        spare_slots = [states.req_id_to_index[row_id] for row_id in forest_step.spare_ids]
        forest_step.slots = np.concatenate([forest_step.group.slots, np.array(spare_slots, dtype=np.int64)])
        longest = 1 + forest_step.budget.num_layers
        is_padded = self._pads_rows and longest * len(forest_step.slots) <= forest_step.budget.max_tokens
        row_ids = [*forest_step.group.row_ids, *forest_step.spare_ids]
        for row_id, path in zip(row_ids, forest_step.forest.rows, strict=True):
            length = longest if is_padded else len(path)
            output.total_num_scheduled_tokens += length - output.num_scheduled_tokens.get(row_id, 0)
            output.num_scheduled_tokens[row_id] = length
            if length > 1:
                output.scheduled_spec_decode_tokens[row_id] = [0] * (length - 1)  # see `_write_drafts`

    def _write_drafts(self, forest_step: ForestStep) -> None:
        """Write what the target computes of every row: its root, its drafts, and the blocks for them."""
        runner, states, tables = self._runner, self._runner.req_states, self._runner.block_tables
        paths = np.zeros((len(forest_step.slots), 1 + runner.num_speculative_steps), dtype=np.int64)
        for row, path in enumerate(forest_step.forest.rows):
            paths[row, : len(path)] = [forest_step.forest.tokens[node] for node in path]
        slots, tokens = (async_tensor_h2d(of_rows, device=runner.device) for of_rows in (forest_step.slots, paths))
        states.last_sampled_tokens[slots, 0] = tokens[:, 0]
        states.draft_tokens[slots] = tokens[:, 1:]
        for number, (own, column) in enumerate(zip(forest_step.blocks, forest_step.columns, strict=True)):
            if own.shape[1] > column + 1:
                beams = slice(forest_step.num_beams)
                newest = async_tensor_h2d(own[beams, column + 1], device=runner.device)
                tables.block_tables[number].gpu[slots[beams], column + 1] = newest
                tables.num_blocks.np[number, forest_step.group.slots] = column + 2
