"""The forests of one step that the device has grown, until the host reads them: once, while the target computes.

Tokens, positions, slots, rows and masks of their nodes are copied on the device to where the target reads them, see
`forest_layout`, and their blocks into vLLM's tables. None of this is uploaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from vllm_trie.search import search_spans
from vllm_trie.search.devices import SearchCopyToHost, uploaded_for_search, uploaded_together_for_search
from vllm_trie.speculation.search.forest import ROOT, Forest
from vllm_trie.speculation.worker.forest_growth import NO_NODE, ForestGrowthPlan, GrowingForests, grown_forests_on_host
from vllm_trie.speculation.worker.forest_layout import ForestPlaces, TargetInputs, lay_out_forest
from vllm_trie.speculation.worker.forest_step import ForestStep
from vllm_trie.worker import launches
from vllm_trie.worker.attention.shared_rows import RowTrees
from vllm_trie.worker.rows.rows import BatchRows


class GrownForests:
    """All such forests of a step; G of them.

    Args:
        plans: The forests' plans.
        growing: The grown forests.
        layout: [G, n] int32 on the device, see `forest_layout.forest_layout_of`.
        new_blocks: [3, n] int64 on the device, by KV cache group, see `new_blocks_of_forests`.
    """

    def __init__(
        self,
        plans: Sequence[ForestGrowthPlan],
        growing: GrowingForests,
        layout: torch.Tensor,
        new_blocks: Sequence[torch.Tensor],
    ) -> None:
        self.plans, self._growing, self._layout, self._new_blocks = plans, growing, layout, new_blocks
        self._words = SearchCopyToHost(growing.words)
        self.laid: ForestPlaces | None = None  # once there is a batch
        first = 0
        for plan in plans:
            plan.forest_step.grown = GrownForest(self, plan, first)
            first += plan.num_tokens

    def write_blocks(self, tables: Sequence[torch.Tensor]) -> None:
        """Writes the blocks that trees have taken into tables [slots, columns] int32, by KV cache group."""
        for table, grown, (rows, slots, columns) in zip(tables, self._growing.tables, self._new_blocks, strict=True):
            if len(rows):
                table[slots, columns] = grown[rows, columns]

    def lay(self, rows: BatchRows) -> ForestPlaces:
        """Where the nodes are in the batch of these rows, as far as the host knows. `place` fills in the rest."""
        if self.laid is None:
            forest_steps, batch = [plan.forest_step for plan in self.plans], rows.batch
            places = [rows.places(forest_step.group.slots) for forest_step in forest_steps]
            known = [
                np.concatenate([one.nodes_at(starts[at]) for one, at in zip(forest_steps, places, strict=True)])
                for starts in (batch.query_start_loc_np, batch.cu_num_logits_np)
            ]
            known.append(np.concatenate(places))
            self.laid = self._room(
                *uploaded_together_for_search([at.astype(np.int64) for at in known], batch.positions.device)
            )
        return self.laid

    def _room(self, tokens: torch.Tensor, logits: torch.Tensor, places: torch.Tensor) -> ForestPlaces:
        masks, num_places = self._growing.masks, 1 + max(sum(plan.sizes) for plan in self.plans)
        rows, ends = masks.new_empty(2, len(tokens), dtype=torch.int32)
        keys, at = masks.new_empty(2, len(self.plans), num_places)
        return ForestPlaces(tokens, logits, places, rows, ends, masks.new_empty(len(tokens), masks.shape[1]), keys, at)

    def place(self, rows: BatchRows, slot_mappings: torch.Tensor) -> None:
        """Writes the nodes to where the target reads its inputs.

        Args:
            rows: The batch's rows; writes the batch's tokens and positions.
            slot_mappings: [KV cache groups, tokens of the batch or more] int64, written.
        """
        laid, batch = self.lay(rows), rows.batch
        inputs = TargetInputs(batch.input_ids, batch.positions, slot_mappings)
        if launches.worker_runs_kernels_on(batch.positions.device):
            kernels = launches.worker_module_for_gpus("speculation.worker.kernels.forest_layout")
            kernels.launch_lay_out_forests(self._growing, self._layout, inputs, laid)
            return
        for plan in self.plans:
            assert plan.forest_step.grown is not None
            lay_out_forest(self._growing, plan, plan.forest_step.grown.tokens.start, inputs, laid)

    def read(self) -> None:
        """Reads the forests to the host. Waits until they are drafted, and for nothing after that."""
        of_nodes = grown_forests_on_host(self._words.wait(), self._growing)
        for plan in self.plans:
            assert plan.forest_step.grown is not None
            plan.forest_step.grown.read(*of_nodes)


class GrownForest:
    """One of the grown forests.

    Args:
        forests: All grown forests of the step.
        plan: This forest's plan.
        first: Where its tokens begin among those of all.
    """

    def __init__(self, forests: GrownForests, plan: ForestGrowthPlan, first: int) -> None:
        self.forests, self._plan, self.place = forests, plan, plan.place
        self.tokens = slice(first, first + plan.num_tokens)
        self.nodes = np.zeros(
            0, np.int64
        )  # [nodes], once they are read: the place of each, see `forest_layout.ForestPlaces`

    @property
    def num_tokens(self) -> int:
        """Tokens that its rows compute."""
        return self._plan.num_tokens

    def trees(self, rows: BatchRows) -> RowTrees:
        """What the target's attention must know of its trees, in the batch of these rows."""
        laid = self.forests.lay(rows)
        masks, of_rows, ends = laid.masks[self.tokens], laid.rows[self.tokens], laid.ends[self.tokens]
        return RowTrees(self._plan.forest_step.start, masks, of_rows, ends)

    def read(self, drafted: np.ndarray, rows: np.ndarray, tables: np.ndarray) -> None:
        """Makes the host's `Forest`; see `forest_growth.GrowingForests` for the arguments."""
        plan, forest_step, sizes = self._plan, self._plan.forest_step, np.array(self._plan.sizes)
        at = search_spans(np.array([part.first for part in plan.parts]), sizes)
        layers, firsts = np.repeat(np.arange(len(sizes)), sizes), np.append(0, np.cumsum(sizes) - sizes)
        parents, tokens = drafted[:, at]
        is_draft = parents != NO_NODE
        is_node = is_draft | (layers == 0)
        numbers = is_node.cumsum() - 1
        parents = np.where(is_draft, numbers[firsts[layers] + parents], ROOT)
        self.nodes = is_node.nonzero()[0]
        counts = np.bincount(layers[self.nodes], minlength=len(sizes)).tolist()
        of_nodes, of_rows = np.stack([parents, tokens])[:, self.nodes], rows[at][self.nodes] - plan.first_row
        forest_step.forest = Forest.grown(of_nodes, of_rows, counts, forest_step.budget.max_drafts)
        for table, grown in zip(forest_step.blocks, tables, strict=True):
            table[:] = grown[plan.rows, : table.shape[1]]


def forests_grown_together(forest_steps: Iterable[ForestStep]) -> GrownForests | None:
    """All forests of a step that the device has grown; None if there are none."""
    return next((forest_step.grown.forests for forest_step in forest_steps if forest_step.grown is not None), None)


def children_in_grown_forests(grown: Sequence[GrownForest], at: np.ndarray | None = None) -> tuple[torch.Tensor, ...]:
    """The keys of some forests' drafts in order, the nodes with these keys, and which logits follow each node.

    [G, places] int64 each, see `forest_layout.ForestPlaces`.

    Args:
        grown: The forests.
        at: [nodes], the logits that follow the nodes of a single forest, if they are not the batch's.
    """
    laid, places = grown[0].forests.laid, [one.place for one in grown]
    assert laid is not None
    first, end = places[0], places[0] + len(places)
    own = (
        slice(first, end) if places == [*range(first, end)] else uploaded_for_search(np.array(places), laid.keys.device)
    )
    keys, nodes = laid.keys[own].sort(dim=1)
    if at is None:
        return keys, nodes, laid.at[own]
    of_places = np.zeros(laid.at.shape[1], np.int64)
    of_places[grown[0].nodes] = at
    return keys, nodes, uploaded_for_search(of_places[None], laid.keys.device)


def new_blocks_of_forests(plans: Sequence[ForestGrowthPlan]) -> list[np.ndarray]:
    """By KV cache group [3, n] int64: rows, counted over all forests, slots and columns that may get new blocks."""
    found = list[np.ndarray]()
    for number in range(len(plans[0].forest_step.blocks)):
        of_number = []
        for plan in plans:
            forest_step = plan.forest_step
            columns = np.arange(forest_step.columns[number] + 1, forest_step.blocks[number].shape[1])
            rows = np.arange(forest_step.num_beams).repeat(len(columns))
            slots = forest_step.group.slots[rows]
            of_number.append(np.stack([plan.first_row + rows, slots, np.tile(columns, forest_step.num_beams)]))
        found.append(np.concatenate(of_number, axis=1).astype(np.int64))
    return found
