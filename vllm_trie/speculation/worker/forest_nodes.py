"""The nodes of one group's forest after the target's forward pass, from which search steps are taken."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vllm_trie.search.rules import SearchInputs, SearchRules
from vllm_trie.speculation.worker.forest_step import ForestStep
from vllm_trie.worker import launches
from vllm_trie.worker.rows.rows import BatchRows
from vllm_trie.worker.select.cohort import selection_index_of
from vllm_trie.worker.select.select import Selector

ROOT_OF_DEAD = 0  # in place of the node of a dead beam, which nothing continues


class VerifiedForestNodes:
    """The nodes of one group's forest, and the target's logits after each.

    Args:
        selector: Takes steps.
        rows: The batch's rows.
        forest_step: The group's forest.
        logits: [N, V], of the batch, unprocessed.

    `at` [nodes] are the nodes' indices in `values`.
    """

    def __init__(self, selector: Selector, rows: BatchRows, forest_step: ForestStep, logits: torch.Tensor) -> None:
        self.forest_step = forest_step
        self.forest = forest_step.forest
        self.rules = forest_step.rules
        self.device = logits.device
        self._selector, self._rows, self._logits = selector, rows, logits
        of_rows = rows.first_logits(rows.places(forest_step.group.slots))
        self.at = forest_step.nodes_at(of_rows)[: self.forest.num_nodes]
        if self.rules[0].is_controlled:
            self._lay_out_paths()

    def _lay_out_paths(self) -> None:
        """Lays out each path from a root to a leaf, as vLLM does a row of drafts."""
        paths = [self.forest.path(leaf) for leaf in self.forest.leaves()]
        nodes, lengths = np.concatenate(paths), np.array([*map(len, paths)])
        slots = np.repeat(self.forest_step.group.slots[[path[0] for path in paths]], lengths)
        depths = np.array(self.forest.depths)[nodes]
        self._of_paths = self.at[nodes], slots, self.forest_step.start + 1 + depths, depths
        self.at[nodes] = np.arange(len(nodes))

    def values(self) -> torch.Tensor:
        """The logits [N, V]; if the rules ask for it, processed ones of all paths.

        These take much memory. So a walk asks for them once, when it begins, and nothing holds them longer.
        """
        if not self.rules[0].is_controlled:
            return self._logits
        values = self._logits[selection_index_of(self._of_paths[0], self.device)]
        return self._selector.processed(self._rows, values, *self._of_paths)

    def parts(self, alike: list[VerifiedForestNodes]) -> list[list[VerifiedForestNodes]]:
        """Groups with this one's rules that may take their steps together, see `Selector.parts`."""
        return self._selector.parts(self.rules[0], alike)

    def index(self, nodes: list[int]) -> torch.Tensor:
        """[nodes], where the logits after nodes are in `values`."""
        return self._selector.rows.upload(self.at[nodes])

    def inputs(self, rules: SearchRules, nodes: Callable[[], list[int]]) -> SearchInputs:
        """The inputs of a step from beams at `nodes`, which is only called if the host must know them."""

        def path(beam: int) -> tuple[int, list[int]]:
            root, *drafts = self.forest.path(nodes()[beam])
            return root, [self.forest.tokens[node] for node in drafts]

        completes = None
        if rules.stops.may_complete:
            num_tokens = np.array([self.forest_step.start + 1])
            completes = self._selector.completes(rules, [self.forest_step.group], num_tokens, path)
        if not launches.worker_runs_kernels_on(self.device):
            return SearchInputs(completes=completes)
        by_kernel = launches.worker_module_for_gpus("worker.kernels.slots").launch_select_next
        return SearchInputs(completes=completes, select_next=by_kernel)
