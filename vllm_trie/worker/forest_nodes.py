"""The nodes of one group's forest after the target's forward: search steps are taken from beams that are at them."""

from __future__ import annotations

import numpy as np
import torch

from vllm_trie.search.beams import Beams
from vllm_trie.search.rules import Means, SelectRules
from vllm_trie.search.step import take_step
from vllm_trie.search.step_result import Step, packed, unpacked
from vllm_trie.worker.forest_step import ForestStep
from vllm_trie.worker.group_rows import BatchRows
from vllm_trie.worker.select import Selector

ROOT_OF_DEAD = 0  # what stands for the node of a beam that is dead, and which nothing continues


class Nodes:
    """The nodes of one group's forest, and what the target says after each.

    Args:
        selector: Takes steps.
        rows: Of the batch.
        forest_step: The group's.
        logits: [N, V], of the batch, unprocessed.
    """

    def __init__(self, selector: Selector, rows: BatchRows, forest_step: ForestStep, logits: torch.Tensor) -> None:
        self.forest_step = forest_step
        self.forest = forest_step.forest
        self.rules = forest_step.rules
        self._selector = selector
        of_rows = rows.first_logits(rows.places(forest_step.group.slots))
        self._logits, self._at = logits, of_rows[self.forest.row_of] + np.array(self.forest.places)  # of each node
        if self.rules[0].is_controlled:
            self._process(rows)

    def _process(self, rows: BatchRows) -> None:
        """Let processors see each path from a root to a leaf as the row of drafts that vLLM would make of it."""
        paths = [self.forest.path(leaf) for leaf in self.forest.leaves()]
        nodes, lengths = np.concatenate(paths), np.array([*map(len, paths)])
        slots = np.repeat(self.forest_step.group.slots[[path[0] for path in paths]], lengths)
        depths = np.array(self.forest.depths)[nodes]
        of_paths = self._at[nodes], slots, self.forest_step.start + 1 + depths, depths
        self._logits = self._selector.processed(rows, self._logits, *of_paths)
        self._at[nodes] = np.arange(len(nodes))

    def logits(self, nodes: list[int]) -> torch.Tensor:
        """[nodes, V]."""
        return self._logits[self._selector.rows.upload(self._at[nodes])]

    def step(self, rules: SelectRules, nodes: list[int], beams: Beams) -> tuple[Step[np.ndarray], Beams]:
        """One step of the search from beams at `nodes`, and what its beams carry."""
        beams = self.forest_step.beams_at(nodes, beams)
        step = take_step(rules, self.logits(nodes)[None], beams, self.means(rules, nodes))
        return on_host(step), beams.after(step)

    def means(self, rules: SelectRules, nodes: list[int]) -> Means:
        """What a step from beams at `nodes` is taken with."""

        def path(beam: int) -> tuple[int, list[int]]:
            root, *drafts = self.forest.path(nodes[beam])
            return root, [self.forest.tokens[node] for node in drafts]

        num_tokens = np.array([self.forest_step.start + 1])
        return Means(completes=self._selector.completes(rules, [self.forest_step.group], num_tokens, path))


def on_host(step: Step) -> Step:
    tensor, layout = packed(step)
    (of_group,) = unpacked(tensor.cpu().numpy(), layout)
    return of_group
