"""One group's forest in one step: `draft` grows it, `verify` judges it; one file for each kind of search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_trie.messages import GroupStep, SpeculationBudget
from vllm_trie.search import search_spans
from vllm_trie.search.beams import SearchBeams, States, gather_search_states
from vllm_trie.search.devices import uploaded_for_search
from vllm_trie.search.rules import SearchRules
from vllm_trie.search.step_result import SearchStepResult
from vllm_trie.speculation.search.draft_lookup import DraftPaths, add_drafts_to_forest
from vllm_trie.speculation.search.forest import Forest, Layer, open_forest_drafts
from vllm_trie.worker.attention.shared_rows import RowTrees
from vllm_trie.worker.rows.rows import BatchRows, GroupRows

NO_BLOCK = 0  # vLLM's null block, which nobody reads


class ForestOutcome(NamedTuple):
    """The outcome of a forest."""

    steps: list[SearchStepResult[np.ndarray]]
    beams: list[list[int]]  # the nodes of the beams before each step
    accepted: list[int]  # drafts that each step accepted
    tokens: torch.Tensor  # [b] int64, the newest tokens, on the device
    carried: SearchBeams  # by the beams after the last step, among those of other groups
    place: int = 0  # the group's index among these


@dataclass(slots=True)
class ForestStep:
    """One group's forest in one step: a `SearchedForestStep` or a `SampledForestStep`."""

    step: GroupStep
    group: GroupRows
    start: int  # position of the roots, and their place in the cache: as many tokens are computed
    block_sizes: list[int]  # by KV cache group
    forest: Forest
    layer: Layer
    blocks: list[np.ndarray]  # by KV cache group: [rows, columns] int32, as far as each row's tree reaches
    spare_blocks: list[list[int]]  # by KV cache group: what the trees of any rows may still take
    states: States  # [1, nodes, ...], by constraint, on the device
    keeps_drafted: bool = True  # the draft model's KV of drafts stays valid where they are accepted
    pending: list[list[int]] = field(default_factory=list)  # by beam, tokens that a draft model has yet to compute
    grown: Any = None  # a `GrownForest`, if the device grows it: until the host reads it, `forest` has roots alone
    budget: SpeculationBudget = field(init=False)  # what the forest may take
    rules: list[SearchRules] = field(init=False)  # by step
    num_beams: int = field(init=False)  # rows of the group

    def __post_init__(self) -> None:
        assert self.step.budget is not None
        self.budget, self.num_beams = self.step.budget, len(self.group.row_ids)
        known = {self.step.phase: self.group.rules}
        known |= {phase: self.group.search.in_phase(phase) for phase in {*self.budget.phases} - known.keys()}
        self.rules = [known[phase] for phase in (self.step.phase, *self.budget.phases)]

    @property
    def num_layers(self) -> int:
        """Layers of drafts; the most possible, if the device has grown them and the host has not read them."""
        is_unread = self.grown is not None and not len(self.grown.nodes)
        return self.budget.num_layers if is_unread else max(self.forest.depths)

    @property
    def columns(self) -> list[int]:
        """By KV cache group: the column of the block of the roots."""
        return [self.start // block_size for block_size in self.block_sizes]

    def num_open(self, number: int) -> int:
        """The most drafts of layers 1 to `number` together."""
        return open_forest_drafts(number, self.budget.num_layers, self.budget.max_drafts)

    @property
    def counts(self) -> np.ndarray:
        """[b], tokens that each row computes: its nodes, or an equal share of the most possible."""
        if self.grown is None:
            return np.array([len(nodes) for nodes in self.forest.rows])
        each, more = divmod(self.grown.num_tokens, self.num_beams)
        return each + (np.arange(self.num_beams) < more)

    def nodes_at(self, starts: np.ndarray) -> np.ndarray:
        """The nodes' indices, if the rows' tokens begin at `starts` [b]; of a grown forest, those of all entries."""
        if self.grown is not None:
            return search_spans(starts, self.counts)
        return starts[self.forest.row_of] + np.array(self.forest.places)

    def trees(self, rows: BatchRows) -> RowTrees:
        """What attention must know of the trees, in the batch of these rows."""
        if self.grown is not None:
            trees: RowTrees = self.grown.trees(rows)
            return trees
        return self.trees_from(dict.fromkeys(range(len(self.forest.rows)), 0))

    def trees_from(self, firsts: Mapping[int, int]) -> RowTrees:
        """Trees of rows, given by row the place of the first node that is computed now."""
        return RowTrees(self.start, [self.forest.attention_mask(row, first) for row, first in firsts.items()])

    def slots_of(self, number: int, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        """[...] int64, the slots in KV cache group `number` of rows at `places` [...], counted from the roots."""
        positions, block_size = self.start + places, self.block_sizes[number]
        return self.blocks[number][rows, positions // block_size].astype(np.int64) * block_size + positions % block_size

    def beams_at(self, nodes: Sequence[int], beams: SearchBeams) -> SearchBeams:
        """`beams` at these nodes, with the nodes' states."""
        return beams._replace(states=self.states_at(nodes)) if self.states else beams

    def states_at(self, nodes: Sequence[int]) -> States:
        """The states of nodes: [1, nodes, ...], by constraint."""
        return gather_search_states(self.states, self._on_device(nodes)) if self.states else self.states

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        """Numbers [1, n] int64 on the states' device."""
        return uploaded_for_search(np.array([[*numbers]], dtype=np.int64), next(iter(self.states.values())).device)

    @classmethod
    def affordable(cls, budget: SpeculationBudget, rules: SearchRules) -> SpeculationBudget:
        """The part of a budget that such a forest can use."""
        return budget

    @classmethod
    def grow(cls, growing: Sequence[tuple[ForestStep, np.ndarray]], logits: torch.Tensor, number: int) -> None:
        """Drafts layer `number` of some groups as their searches will select in that step.

        Args:
            growing: Groups, and for each the consecutive logits that follow the nodes of its newest layer.
            logits: [N, V] of the draft model.
            number: From 1 on.
        """
        raise NotImplementedError

    @classmethod
    def search(cls, nodes: Sequence[Any]) -> list[ForestOutcome]:
        """Takes search steps of some groups, as many as their `forest_nodes.VerifiedForestNodes` allow."""
        raise NotImplementedError

    def follow_layer(self, first: int) -> None:
        """Finds states and blocks for the newest layer, whose nodes are those from `first` on."""
        self._follow(range(first, self.forest.num_nodes))
        self._take_blocks()

    def add_layers(self, found: DraftPaths) -> None:
        """Drafts all layers at once."""
        for nodes in add_drafts_to_forest(self.forest, found, self.budget.draft_width):
            self._follow(nodes)
        self._take_blocks()

    def _take_blocks(self) -> None:
        """Gives rows spare blocks as far as their trees reach."""
        for table, spare, block_size in zip(self.blocks, self.spare_blocks, self.block_sizes, strict=True):
            for row, nodes in enumerate(self.forest.rows):
                reached = table[row, self.start // block_size : (self.start + len(nodes) - 1) // block_size + 1]
                for column in np.flatnonzero(reached == NO_BLOCK):
                    reached[column] = spare.pop()

    def _follow(self, nodes: Sequence[int]) -> None:
        """Advances states to the nodes of the newest layer, the only ones whose states are not known."""
        if not self.states or not nodes:
            return
        parents = self._on_device([self.forest.parents[node] for node in nodes])
        tokens = self._on_device([self.forest.tokens[node] for node in nodes])
        self.states = followed_forest_states(self.states, parents, tokens)


def followed_forest_states(states: States, parents: torch.Tensor, tokens: torch.Tensor) -> States:
    """[1, nodes + n, ...], the states of some nodes and of n more after them; `parents`, `tokens`: [1, n] int64."""
    before = gather_search_states(states, parents)
    return {key: torch.cat([state, key.advance(before[key], tokens)], 1) for key, state in states.items()}


def add_forest_layer(forest_steps: Sequence[ForestStep], logits: torch.Tensor, number: int) -> None:
    """Drafts layer `number` of all these groups.

    Args:
        forest_steps: The groups' forests.
        logits: [N, V] of the draft model after all nodes of their newest layers.
        number: From 1 on.
    """
    ends = np.cumsum([len(forest_step.layer.nodes) for forest_step in forest_steps])
    rows = np.split(np.arange(ends[-1]), ends[:-1])
    known = [forest_step.forest.num_nodes for forest_step in forest_steps]
    kinds: dict[type[ForestStep], None] = dict.fromkeys(map(type, forest_steps))
    for kind in kinds:
        kind.grow([each for each in zip(forest_steps, rows, strict=True) if type(each[0]) is kind], logits, number)
    for forest_step, first in zip(forest_steps, known, strict=True):
        forest_step.follow_layer(first)
