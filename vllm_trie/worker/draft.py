"""Draft a forest for every group that has a budget to speculate, and lay it out as rows.

Every path from a root of the forest to a leaf is a row with draft tokens, as vLLM has them, so that it gives logits
at each node. The first rows are the beams' own; others get a slot that lasts one step, with lookahead
blocks of its own. Next: `verify`, then `accept_path`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_trie.messages import GroupStep
from vllm_trie.search.forest import Forest, Layer, affordable
from vllm_trie.search.sampling import generator
from vllm_trie.worker.draft_model import DraftModel
from vllm_trie.worker.forest_step import ForestStep
from vllm_trie.worker.rank_check import RankCheck
from vllm_trie.worker.rows import GroupRows
from vllm_trie.worker.select import Selector
from vllm_trie.worker.step_context import StepContext

NO_BLOCK = 0


class Drafter:
    """Drafts for the groups of one runner.

    Args:
        runner: vLLM's, with a draft model.
        selector: Knows its KV blocks.
        rank_check: Compares forests between ranks; None if they are not to be compared.
    """

    def __init__(self, runner: GPUModelRunner, selector: Selector, rank_check: RankCheck | None) -> None:
        self._runner = runner
        self._selector = selector
        self._rank_check = rank_check
        self._draft_model = DraftModel(runner)
        self._pads_rows = runner.device.type == "cuda"  # rows of equal length may replay a graph

    def draft(
        self, context: StepContext, groups: dict[str, GroupRows], output: SchedulerOutput
    ) -> dict[str, ForestStep]:
        """A forest for every group with a budget; its rows are added to the runner's slots and to `output`."""
        forests = {group_id: self._begin(context.steps[group_id], groups[group_id]) for group_id in context.speculating}
        self._catch_up(forests)
        for number in range(1, max(forest_step.budget.num_layers for forest_step in forests.values()) + 1):
            self._draft_layer(forests, number)
            if self._rank_check is not None:  # before ranks compute forests of different shapes together, and hang
                drafts = {group_id: forest_step.forest.as_arrays() for group_id, forest_step in forests.items()}
                self._rank_check.compare("drafts", drafts)
        for group_id, forest_step in forests.items():
            self._add_rows(group_id, forest_step, output)
        self._runner.req_states.apply_staged_writes()
        self._runner.block_tables.apply_staged_writes()
        for forest_step in forests.values():
            self._write_drafts(forest_step)
        return forests

    def _begin(self, step: GroupStep, group: GroupRows) -> ForestStep:
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
        if step.rules.beam_sampling is not None:
            room = len(roots), num_rows, budget.max_tokens
            num_layers, draft_width = affordable(*room, budget.num_layers, budget.draft_width, step.rules.width)
            budget = replace(budget, num_layers=num_layers, draft_width=draft_width)
        pending = states.all_token_ids.gpu[slots, group.num_drafted : start + 1].tolist()
        group.num_drafted = start
        forest = Forest(roots, num_rows, budget.max_tokens)
        layer = Layer(list(range(len(roots))), group.scores, range(len(roots)))
        rng = None if step.draw is None else generator(*step.draw)
        return ForestStep(step, budget, group, start, tables.block_sizes, forest, layer, blocks, pending, rng)

    def _num_skipped(self, number: int, num_computed_tokens: int) -> int:
        """How many blocks in front of the window of a KV cache group the scheduler holds no longer."""
        spec = self._runner.kv_cache_config.kv_cache_groups[number].kv_cache_spec
        if not isinstance(spec, SlidingWindowSpec):
            return 0
        return max(num_computed_tokens + 1 - spec.sliding_window, 0) // spec.block_size

    def _catch_up(self, forests: dict[str, ForestStep]) -> None:
        """Compute with the draft model what plain steps have added, so that only a few tokens are left for each row."""
        num_rows = sum(len(forest_step.pending) for forest_step in forests.values())
        per_row = max(self._runner.max_num_tokens // num_rows, 1)
        for forest_step in forests.values():
            while len(forest_step.pending[0]) > per_row:
                starts = [forest_step.start + 1 - len(row) for row in forest_step.pending]
                of_beams = [table[: len(starts)] for table in forest_step.blocks]
                self._draft_model.logits([row[:per_row] for row in forest_step.pending], starts, of_beams)
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
        logits = self._draft_model.logits(tokens, starts, blocks)
        copies = list[tuple[int, int]]()
        for forest_step, of_rows in zip(active, torch.split(logits, list(map(len, rows))), strict=True):
            for fork in forest_step.add_layer(of_rows, number):
                copies += forest_step.fork(fork, number)
        if copies:
            self._selector.kv_blocks.copy(*np.array(copies).T)

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
