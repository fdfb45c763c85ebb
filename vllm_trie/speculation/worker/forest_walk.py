"""Search steps from node to node of forests, none of which waits for what the previous one has chosen.

The device itself looks up the nodes of the next beams; the host must only know them to find stop strings. Where the
host can read the device's memory, it takes no more steps than lead somewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.search.beams import SearchBeams, gather_search_states
from vllm_trie.search.devices import filled_for_search, is_searched_on_host, search_arange, uploaded_for_search
from vllm_trie.search.rules import SearchRules
from vllm_trie.search.step import take_packed_search_step
from vllm_trie.search.step_result import PackedSearchStep
from vllm_trie.speculation.worker.forest_layout import NO_CHILD, PARENT_UNIT
from vllm_trie.speculation.worker.forest_nodes import ROOT_OF_DEAD, VerifiedForestNodes
from vllm_trie.speculation.worker.grown_forests import children_in_grown_forests
from vllm_trie.worker import launches
from vllm_trie.worker.kernels import KernelStepSizes
from vllm_trie.worker.rows.rows import beams_of_rows


class WalkStep(NamedTuple):
    """One step of a walk, of G groups."""

    taken: PackedSearchStep
    after: SearchBeams  # what the rows carry after it


class VerifyingWalk:
    """Steps of groups with equal rules, as many as their rules allow, whether or not these lead somewhere.

    A beam that was not drafted is dead in the next step.

    Args:
        nodes: The nodes of each group.
    """

    def __init__(self, nodes: Sequence[VerifiedForestNodes]) -> None:
        self.nodes = nodes
        self.steps: list[WalkStep] = []  # taken so far
        self._grown = [of_group.forest_step.grown for of_group in nodes if of_group.forest_step.grown is not None]
        self._keys, self._known, self._at = self._children()  # [G, N] each

    def _children(self) -> Sequence[torch.Tensor]:
        """The drafts' keys in order, the nodes with these keys, and for each node the logits that follow it.

        Where the device has grown the forests, a node is its place among all entries.
        """
        if self._grown:
            is_controlled = self.nodes[0].rules[0].is_controlled
            return children_in_grown_forests(self._grown, self.nodes[0].at if is_controlled else None)
        num_nodes = max(of_group.forest.num_nodes for of_group in self.nodes)
        children = np.full((3, len(self.nodes), num_nodes + 1), NO_CHILD)
        for of_group, (keys, known, at) in zip(self.nodes, children.swapaxes(0, 1), strict=True):
            forest, first = of_group.forest, len(of_group.forest.rows)
            own = np.array(forest.parents[first:], np.int64) * PARENT_UNIT + np.array(forest.tokens[first:], np.int64)
            order = own.argsort()
            keys[: len(own)], known[: len(own)], at[: len(of_group.at)] = own[order], order + first, of_group.at
        return list(uploaded_for_search(children, self.device))

    @property
    def device(self) -> torch.device:
        """The device of the walk."""
        return self.nodes[0].device

    def __iter__(self) -> Iterator[PackedSearchStep]:
        """Takes the steps, one after the other."""
        values, groups = self.nodes[0].values(), [of_group.forest_step.group for of_group in self.nodes]
        beams, width = beams_of_rows(groups), len(groups[0].row_ids)
        nodes = search_arange(width, self.device).expand(len(groups), width)
        num_layers = max(of_group.forest_step.num_layers for of_group in self.nodes)
        all_rules = self.nodes[0].rules[: 1 + num_layers]
        for rules in all_rules:
            beams = self._at_nodes(beams, nodes)
            taken = self._take(rules, values, nodes, beams)
            self.steps.append(WalkStep(taken, beams.after(taken.going)))
            yield taken
            if rules.is_last or len(self.steps) == len(all_rules):
                return
            nodes, is_drafted = self._next_nodes(taken, nodes)
            beams = self.steps[-1].after.only(is_drafted)

    def _at_nodes(self, beams: SearchBeams, nodes: torch.Tensor) -> SearchBeams:
        """`beams` at nodes [G, b], with the nodes' states."""
        states = self.nodes[0].forest_step.states
        return beams._replace(states=gather_search_states(states, nodes)) if states else beams

    def _take(
        self, rules: SearchRules, values: torch.Tensor, nodes: torch.Tensor, beams: SearchBeams
    ) -> PackedSearchStep:
        """One step from beams at `nodes` [G, b], by the logits `values` [N, V]."""
        at, device = self._at.gather(1, nodes).flatten(), self.device
        if launches.worker_runs_kernels_on(device):
            kernels = launches.worker_module_for_gpus("worker.select.by_kernels")
            if take := kernels.select_by_kernels(rules, KernelStepSizes.of(beams, values.shape[1])):
                nowhere = torch.empty(len(at), 1, dtype=torch.int64, device=device)
                which = kernels.KernelLogits.of(values, at, rules.stops)
                return take(which, beams, search_arange(len(at), device), nowhere)
        inputs = self.nodes[0].inputs(rules, cache(lambda: self._numbers(nodes[0])))
        return take_packed_search_step(rules, values[at].view(*nodes.shape, -1), beams, inputs)

    def _numbers(self, nodes: torch.Tensor) -> list[int]:
        """Nodes [b] of the first group, as the host numbers them. Waits for the device."""
        known = nodes.cpu().numpy()
        numbered: np.ndarray = np.searchsorted(self._grown[0].nodes, known) if self._grown else known
        return numbered.tolist()

    def _next_nodes(self, taken: PackedSearchStep, nodes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The nodes [G, b] of drafted beams, and which beams are drafted."""
        tokens, parents = taken.going.tokens.long(), nodes.gather(1, taken.going.parents.long())
        keys = torch.add(tokens, parents, alpha=PARENT_UNIT)
        places = torch.searchsorted(self._keys, keys)
        is_drafted = self._keys.gather(1, places) == keys
        return self._known.gather(1, places).where(
            is_drafted, filled_for_search((), ROOT_OF_DEAD, self.device)
        ), is_drafted


def verifying_walks_of(nodes: Sequence[VerifiedForestNodes]) -> list[VerifyingWalk]:
    """Walks of groups: those with equal rules and nothing of their own walk together, as far as memory allows."""
    alike = defaultdict(list)
    for number, of_group in enumerate(nodes):
        first = of_group.rules[0]
        is_alone = (
            is_searched_on_host(of_group.device) or first.is_controlled or first.constraints or first.stops.strings
        )
        alike[number if is_alone else None, *of_group.rules].append(of_group)
    return [VerifyingWalk(part) for of_walk in alike.values() for part in of_walk[0].parts(of_walk)]
