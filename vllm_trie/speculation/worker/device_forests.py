"""Grows searched forests on a device that the host neither reads nor waits for.

The host knows how many nodes a layer may have; only the device knows what they are. Each node is a row of the draft
model's batch that computes one token. The result is `grown_forests`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_trie.search.beams import States
from vllm_trie.search.devices import uploaded_for_search
from vllm_trie.speculation.worker import forest_growth
from vllm_trie.speculation.worker.best_drafts import rank_drafts_after_nodes
from vllm_trie.speculation.worker.draft_batch import DraftInputs
from vllm_trie.speculation.worker.forest_growth import ForestGrowthPlan, forest_growth_layer, forest_growth_plans
from vllm_trie.speculation.worker.forest_layout import forest_layout_of
from vllm_trie.speculation.worker.forest_step import ForestStep, followed_forest_states
from vllm_trie.speculation.worker.grown_forests import GrownForests, new_blocks_of_forests
from vllm_trie.worker import launches
from vllm_trie.worker.attention.shared_rows import RowTrees, SharedRows

if TYPE_CHECKING:
    from vllm_trie.speculation.worker.kernels.forest_growth import ForestGrowthKernels


class DeviceForests:
    """The growing forests of one step, which start as roots.

    Args:
        forest_steps: The groups' forests.
        block_sizes: By KV cache group.
        device: Where they grow.
    """

    def __init__(self, forest_steps: Sequence[ForestStep], block_sizes: Sequence[int], device: torch.device) -> None:
        self.num_layers = max(forest_step.budget.num_layers for forest_step in forest_steps)
        self._device, self._block_sizes = device, block_sizes
        # In each layer, forests that still grow come first.
        self._plans = plans = forest_growth_plans(sorted(forest_steps, key=lambda one: -one.budget.num_layers))
        last = plans[0].parts[-1]
        depths = np.zeros(last.first + last.size, np.int64)
        for plan in plans:
            for depth, part in enumerate(plan.parts):
                depths[part.nodes] = plan.forest_step.start + depth
        most = max(
            forest_growth_layer(plans, number).stop - forest_growth_layer(plans, number).start
            for number in range(self.num_layers)
        )
        self._starts = np.arange(most + 1, dtype=np.int32)
        new_blocks = new_blocks_of_forests(plans)
        more_arrays: list[np.ndarray] = [depths, self._starts, forest_layout_of(plans), *new_blocks]
        self._kernels: ForestGrowthKernels | None = None
        if launches.worker_runs_kernels_on(device):
            kernels = launches.worker_module_for_gpus("speculation.worker.kernels.forest_growth")
            self._kernels = kernels.ForestGrowthKernels(plans, block_sizes)
            more_arrays += self._kernels.arrays
        self._growing, uploaded = forest_growth.plant_forests(plans, more_arrays, device)
        self._positions, self._starts_on_device, self._layout, *uploaded = uploaded
        self._new_blocks, of_kernels = uploaded[: len(new_blocks)], uploaded[len(new_blocks) :]
        if self._kernels is not None:
            self._kernels.on_device = of_kernels
        self._states: list[States] = [plan.forest_step.states for plan in plans]

    @property
    def forest_steps(self) -> list[ForestStep]:
        """In the order of their roots in the first layer's batch."""
        return [plan.forest_step for plan in self._plans]

    def draft(self, logits: torch.Tensor, number: int) -> None:
        """Drafts layer `number` from the draft model's logits after the nodes of the previous layer.

        Args:
            logits: [nodes of groups that have such a layer, V].
            number: From 1 on.
        """
        plans, first = self._active(number), self._plans[0].parts[number - 1].first
        drafted = self._kernels.draft(self._growing, logits, number) if self._kernels is not None else set()
        for plan in plans:
            if plan.place not in drafted:
                before = plan.parts[number - 1]
                nodes = slice(before.first - first, before.first - first + before.size)
                forest_growth.draft_growing_layer(self._growing, plan, number, *self._best(plan, logits, nodes, number))
            self._follow(plan, number)
        self._place(plans, number)

    def _best(
        self, plan: ForestGrowthPlan, logits: torch.Tensor, nodes: slice, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `best_drafts.rank_drafts_after_nodes`."""
        if self._kernels is not None and (best := self._kernels.best(plan, logits, nodes, number)):
            return best
        own = logits[nodes]
        states = {key: state[:, state.shape[1] - len(own) :] for key, state in self._states[plan.place].items()}
        return rank_drafts_after_nodes(plan.forest_step, own, states, number)

    def inputs(self, number: int) -> DraftInputs:
        """The draft model's inputs for the nodes of layer `number`, of groups that have another layer."""
        plans, growing = self._active(number + 1), self._growing
        nodes = forest_growth_layer(plans, number)
        count, first = nodes.stop - nodes.start, nodes.start
        sharing, most_ends = [], np.zeros(count, np.int32)
        for plan in plans:
            part, start = plan.parts[number], plan.forest_step.start
            own = np.arange(part.first - first, part.first - first + part.size)
            num_drafts = sum(of_layer.size for of_layer in plan.parts[1 : number + 1])
            most_ends[own] = start + 1 + min(num_drafts, plan.forest_step.num_open(number))
            trees, num_shared = RowTrees(start, growing.masks[part.nodes]), plan.forest_step.step.num_shared
            assert num_shared is not None
            sharing.append([SharedRows(own, of_table, trees) for of_table in num_shared])
        return DraftInputs(
            *(growing.tokens[nodes], self._positions[nodes], growing.slots[:, nodes]),
            *(self._starts_on_device[: count + 1], growing.ends[nodes]),
            growing.tables.index_select(1, growing.rows[nodes]).unbind(0),
            *(self._starts[: count + 1], most_ends),
            None,
            partial(self._slots_before, number),
            sharing,
        )

    def finish(self) -> GrownForests:
        """Hands the forests to their steps, once all layers are drafted."""
        for plan, states in zip(self._plans, self._states, strict=True):
            plan.forest_step.states = states
        return GrownForests(self._plans, self._growing, self._layout, self._new_blocks)

    def _active(self, number: int) -> list[ForestGrowthPlan]:
        """The forests that have a layer `number`."""
        return [plan for plan in self._plans if plan.forest_step.budget.num_layers >= number]

    def _place(self, plans: Sequence[ForestGrowthPlan], number: int) -> None:
        if self._kernels is not None and self._kernels.place(self._growing, number, len(plans)):
            return
        for plan in plans:
            forest_growth.place_growing_layer(self._growing, plan, number, self._block_sizes)

    def _follow(self, plan: ForestGrowthPlan, number: int) -> None:
        """Finds the states of a layer's nodes; arbitrary ones for unused entries."""
        if states := self._states[plan.place]:
            own, first = plan.parts[number].nodes, sum(part.size for part in plan.parts[: number - 1])
            parents = self._growing.parents[own].clamp(min=0).long() + first
            self._states[plan.place] = followed_forest_states(
                states, parents[None], self._growing.tokens[own].long()[None]
            )

    def _slots_before(self, number: int, table: int) -> torch.Tensor:
        """[T] int64, the slots in a KV cache group of the parents of layer `number`'s nodes."""
        plans = self._active(number + 1)
        sizes = [plan.parts[number].size for plan in plans]
        firsts = np.repeat([plan.parts[number - 1].first for plan in plans], sizes)
        parents = self._growing.parents[forest_growth_layer(plans, number)].clamp(min=0)
        return self._growing.slots[table][uploaded_for_search(firsts, self._device) + parents]
