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

    The logits [N, V] `values` are processed if the rules ask for it; `at` [nodes] are the nodes' indices in them.
    """

    def __init__(self, selector: Selector, rows: BatchRows, forest_step: ForestStep, logits: torch.Tensor) -> None:
        self.forest_step = forest_step
        self.forest = forest_step.forest
        self.rules = forest_step.rules
        self._selector = selector
        of_rows = rows.first_logits(rows.places(forest_step.group.slots))
        self.values, self.at = logits, forest_step.nodes_at(of_rows)[: self.forest.num_nodes]
        if self.rules[0].is_controlled:
            self._process(rows)

    def _process(self, rows: BatchRows) -> None:
        """Applies logits processors to each path from a root to a leaf, as vLLM does to a row of drafts."""
        paths = [self.forest.path(leaf) for leaf in self.forest.leaves()]
        nodes, lengths = np.concatenate(paths), np.array([*map(len, paths)])
        slots = np.repeat(self.forest_step.group.slots[[path[0] for path in paths]], lengths)
        depths = np.array(self.forest.depths)[nodes]
        of_paths = self.at[nodes], slots, self.forest_step.start + 1 + depths, depths
        values = self.values[selection_index_of(self.at[nodes], self.values.device)]
        self.values = self._selector.processed(rows, values, *of_paths)
        self.at[nodes] = np.arange(len(nodes))

    def parts(self, alike: list[VerifiedForestNodes]) -> list[list[VerifiedForestNodes]]:
        """Groups with this one's rules that may take their steps together, see `Selector.parts`."""
        return self._selector.parts(self.rules[0], alike)

    def logits(self, nodes: list[int]) -> torch.Tensor:
        """[nodes, V], the logits after nodes."""
        return self.values[self._selector.rows.upload(self.at[nodes])]

    def inputs(self, rules: SearchRules, nodes: Callable[[], list[int]]) -> SearchInputs:
        """The inputs of a step from beams at `nodes`, which is only called if the host must know them."""

        def path(beam: int) -> tuple[int, list[int]]:
            root, *drafts = self.forest.path(nodes()[beam])
            return root, [self.forest.tokens[node] for node in drafts]

        completes = None
        if rules.stops.may_complete:
            num_tokens = np.array([self.forest_step.start + 1])
            completes = self._selector.completes(rules, [self.forest_step.group], num_tokens, path)
        if not launches.worker_runs_kernels_on(self.values.device):
            return SearchInputs(completes=completes)
        by_kernel = launches.worker_module_for_gpus("worker.kernels.slots").launch_select_next
        return SearchInputs(completes=completes, select_next=by_kernel)
