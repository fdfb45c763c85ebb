"""Writes what trees of drafts add to the rows in vLLM's arrays by slot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_trie.messages import MOST_DRAFTS
from vllm_trie.search.devices import uploaded_together_for_search
from vllm_trie.speculation.worker.forest_path import AcceptedPath
from vllm_trie.speculation.worker.forest_step import ForestStep
from vllm_trie.speculation.worker.grown_forests import GrownForests, forests_grown_together
from vllm_trie.speculation.worker.hidden_states import DraftHiddenStates
from vllm_trie.speculation.worker.table_entries import DraftTableEntries, draft_tables_side_by_side
from vllm_trie.worker.kv.kv_moves import KVMoves, move_kv
from vllm_trie.worker.rows.rows import Rows


class DraftTreeRows:
    """The trees in the rows of one runner, which may have more drafts than vLLM's own.

    Args:
        runner: vLLM's.
        rows: The runner's rows.
    """

    def __init__(self, runner: GPUModelRunner, rows: Rows) -> None:
        self._runner, self._rows = runner, rows
        states = runner.req_states
        num_slots, num_drafts = states.draft_tokens.shape
        # [slots, drafts] int64; vLLM's own are the first ones, where it looks for them.
        self.drafts = states.draft_tokens.new_zeros(num_slots, max(num_drafts, MOST_DRAFTS))
        states.draft_tokens = self.drafts[:, :num_drafts]
        self.hidden_states: DraftHiddenStates | None = None  # for a head, once there is a KV cache

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which vLLM finds the drafts of trees where it looks for its own."""
        states = self._runner.req_states
        stock, states.draft_tokens = states.draft_tokens, self.drafts
        try:
            yield
        finally:
            states.draft_tokens = stock

    def accept(self, paths: Sequence[AcceptedPath], places: np.ndarray, sampled: torch.Tensor) -> None:
        """Lets rows of groups continue from where their searches have arrived.

        Args:
            paths: By group; those with logits processors first.
            places: [rows of all groups], the rows' indices in the batch.
            sampled: [R, steps] int64, receives the new tokens of every row.
        """
        move_kv(KVMoves.together([path.moves for path in paths]), self._rows.kv)
        slots, sources = (np.concatenate(of_groups) for of_groups in zip(*(path[:2] for path in paths), strict=True))
        entries = [entry for path in paths for entry in path.entries]
        rows = [slots, sources, places, draft_tables_side_by_side([path.tokens for path in paths])]
        to, source, at, tokens = self._upload_with_blocks(rows, entries)
        history = slice(min(path.num_prompt for path in paths), max(path.num_tokens for path in paths))
        tokens_of_rows = self._rows.all_tokens
        tokens_of_rows[to, history] = tokens_of_rows[source, history]  # nobody reads beyond a history's end
        sampled[at, : tokens.shape[1]] = tokens
        if num_controlled := sum(len(path.slots) for path in paths if path.is_controlled):
            self._rows.take_over_controls(to[:num_controlled], source[:num_controlled])

    def _upload_with_blocks(
        self, arrays: Sequence[np.ndarray], entries: Sequence[DraftTableEntries]
    ) -> Sequence[torch.Tensor]:
        """Uploads arrays, and by the same copy the entries of block tables, which it writes."""
        tables = self._runner.block_tables
        for slots, number, num_blocks, *_ in entries:
            tables.num_blocks.np[number, slots] = num_blocks
        by_number = defaultdict[int, list[DraftTableEntries]](list)
        for entry in entries:
            if len(entry.blocks):
                by_number[entry.number].append(entry)
        at = [np.concatenate([entry.at for entry in of_number], axis=1) for of_number in by_number.values()]
        blocks = [np.concatenate([entry.blocks for entry in of_number]) for of_number in by_number.values()]
        on_device = uploaded_together_for_search([*arrays, *at, *blocks], self._rows.device)
        first, end = len(arrays), len(arrays) + len(by_number)
        for number, (rows, columns), of_number in zip(by_number, on_device[first:end], on_device[end:], strict=True):
            tables.block_tables[number].gpu[rows, columns] = of_number
        return on_device[: len(arrays)]

    def write_drafts(self, forest_steps: Sequence[ForestStep]) -> None:
        """Writes what the target computes of every row of forests: its root, its drafts, and the blocks for them.

        At least one forest is needed. For forests that the device has grown, it only writes the blocks.
        """
        self._runner.req_states.apply_staged_writes()
        self._runner.block_tables.apply_staged_writes()
        if (grown := forests_grown_together(forest_steps)) is not None:
            self._write_blocks(grown)
        if made := [forest_step for forest_step in forest_steps if forest_step.grown is None]:
            self._write_made(made)

    def _write_blocks(self, grown: GrownForests) -> None:
        tables = self._runner.block_tables
        for forest_step in (plan.forest_step for plan in grown.plans):
            for number, table in enumerate(forest_step.blocks):
                tables.num_blocks.np[number, forest_step.group.slots] = table.shape[1]
        grown.write_blocks([table.gpu for table in tables.block_tables])

    def _write_made(self, forest_steps: Sequence[ForestStep]) -> None:
        states = self._runner.req_states
        slots = np.concatenate([forest_step.group.slots for forest_step in forest_steps])
        trees = draft_tables_side_by_side(
            [np.array([tokens]) for one in forest_steps for tokens in one.forest.tokens_of_rows()]
        )
        entries = [
            DraftTableEntries.of(forest_step.group.slots, number, table, column + 1)
            for forest_step in forest_steps
            for number, (table, column) in enumerate(zip(forest_step.blocks, forest_step.columns, strict=True))
        ]
        at, tokens = self._upload_with_blocks([slots, trees], entries)
        states.last_sampled_tokens[at, 0] = tokens[:, 0]
        self.drafts[at, : tokens.shape[1] - 1] = tokens[:, 1:]
