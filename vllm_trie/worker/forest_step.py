"""One group's forest in one step: it grows in `draft`, and is judged in `verify`; a file for each kind of search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_trie.messages import GroupStep, SpeculationBudget
from vllm_trie.search.beams import Beams, States, gather_states
from vllm_trie.search.draft_lookup import DraftPaths, add_drafts
from vllm_trie.search.forest import Forest, Layer, RowFork
from vllm_trie.search.rules import SelectRules
from vllm_trie.search.step_result import Step
from vllm_trie.worker.group_rows import GroupRows


class Found(NamedTuple):
    """What came of a forest."""

    steps: list[Step[np.ndarray]]
    beams: list[list[int]]  # the nodes of the beams before each step
    accepted: list[int]  # how many drafts each accepted
    carried: Beams  # by the beams after the last


@dataclass(slots=True)
class ForestStep:
    """One group's forest in one step: a `SearchedForest` or a `DrawnForest`."""

    step: GroupStep
    group: GroupRows
    start: int  # position of the roots: as many tokens are computed
    block_sizes: list[int]  # by KV cache group
    forest: Forest
    layer: Layer
    blocks: list[np.ndarray]  # by KV cache group: [rows, columns] int32 of every row, up to the last it may write
    states: States  # [1, nodes, ...], under each constraint, on the device
    num_layers: int = 0
    pending: list[list[int]] = field(default_factory=list)  # of each beam the tokens that a draft model has to compute
    spare_ids: list[str] = field(default_factory=list)  # of the rows that are no beam's
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # of all rows

    @property
    def budget(self) -> SpeculationBudget:
        """What it may take."""
        assert self.step.budget is not None
        return self.step.budget

    @property
    def num_beams(self) -> int:
        """Rows that are beams' own."""
        return len(self.group.row_ids)

    @property
    def rules(self) -> list[SelectRules]:
        """By step."""
        return [self.step.rules, *self.budget.rules]

    @property
    def columns(self) -> list[int]:
        """By KV cache group: that of the block in which the roots are."""
        return [self.start // block_size for block_size in self.block_sizes]

    def beams_at(self, nodes: Sequence[int], beams: Beams) -> Beams:
        """These beams, which have come to these nodes, with the states that they have there."""
        if not self.states:
            return beams
        return beams._replace(states=gather_states(self.states, self._on_device(nodes)))

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        """[1, numbers] int64."""
        return async_tensor_h2d([[*numbers]], device=self.layer.scores.device, dtype=torch.int64)

    def fork(self, fork: RowFork, number: int) -> list[tuple[int, int]]:
        """Let a row begin as a copy of another, at layer `number`. Returns the blocks to copy."""
        copies = list[tuple[int, int]]()
        for table, column, block_size in zip(self.blocks, self.columns, self.block_sizes, strict=True):
            source, destination = table[fork.source], table[fork.destination]
            destination[:column] = source[:column]
            written = slice(column, (self.start + number - 1) // block_size + 1)
            copies += zip(source[written].tolist(), destination[written].tolist(), strict=True)
        return copies

    @classmethod
    def affordable(cls, budget: SpeculationBudget, num_roots: int, rules: SelectRules) -> SpeculationBudget:
        """What of a budget such a forest can use."""
        return budget

    def grow(self, logits: torch.Tensor, number: int) -> list[RowFork]:
        """Draft layer `number` as the search will select in that step. Returns the rows to fork for it.

        Args:
            logits: [nodes, V] of the draft model after each node of the layer before.
        """
        raise NotImplementedError

    def search(self, nodes: Any) -> Found:
        """Take steps of the search, as many as the forest holds, on its `forest_nodes.Nodes`."""
        raise NotImplementedError

    def add_layer(self, logits: torch.Tensor, number: int) -> list[RowFork]:
        """See `grow`; counts layers, too."""
        forks = self.grow(logits, number)
        self.num_layers += bool(self.layer.nodes)
        return forks

    def add_layers(self, found: DraftPaths) -> list[tuple[int, int]]:
        """Draft all layers at once. Returns the blocks to copy."""
        for nodes in add_drafts(self.forest, found, self.budget.draft_width):
            self.follow(nodes)
            self.num_layers += 1
        copies = list[tuple[int, int]]()
        for row in range(self.num_beams, len(self.forest.rows)):
            copies += self.fork(RowFork(self.forest.rows[row][0], row), 1)  # the target computes all that was drafted
        return copies

    def follow(self, nodes: Sequence[int]) -> None:
        """Advance to the nodes of the newest layer, the only ones whose states are not known."""
        if not self.states or not nodes:
            return
        parents = self._on_device([self.forest.parents[node] for node in nodes])
        tokens = self._on_device([self.forest.tokens[node] for node in nodes])
        before = gather_states(self.states, parents)
        self.states = {
            key: torch.cat([state, key.advance(before[key], tokens)], 1) for key, state in self.states.items()
        }
