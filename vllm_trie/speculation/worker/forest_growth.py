"""Grows the layers of searched forests on a device that the host does not read.

`speculation.search.forest.draft_forest_layer` defines what is drafted, `forest_step.ForestStep` which blocks rows take.
Here both are done without the host, which only knows how many nodes a layer may have. `kernels.forest_growth` has the
same as kernels; `device_forests` calls either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_trie.search.devices import NEVER, search_arange, uploaded_together_for_search
from vllm_trie.speculation.worker.forest_step import NO_BLOCK, ForestStep
from vllm_trie.worker.attention.shared_rows import WORD

NO_NODE = -1  # the parent of roots and of unused node entries
ALIGNED = 4  # nodes: layers begin, and tables have columns, at multiples of this, so that reads are aligned
NUM_DRAFTS, NUM_NARROW, NUM_TAKEN = 0, 1, 2  # columns of `GrowingForests.totals`


class GrowthPart(NamedTuple):
    """The entries of one layer of a forest, as many as it may have nodes, among those of all layers and forests."""

    first: int
    size: int

    @property
    def nodes(self) -> slice:
        return slice(self.first, self.first + self.size)


class ForestGrowthPlan(NamedTuple):
    """What the host knows of a forest before it grows."""

    place: int  # among all forests
    first_row: int  # among the rows of all forests
    forest_step: ForestStep
    parts: list[GrowthPart]  # by layer, the roots first

    @property
    def rows(self) -> slice:
        """Its rows among those of all forests."""
        return slice(self.first_row, self.first_row + self.forest_step.num_beams)

    @property
    def sizes(self) -> list[int]:
        """By layer, the most nodes."""
        return [part.size for part in self.parts]

    @property
    def num_tokens(self) -> int:
        """The most nodes in all, roots included: unused entries are computed all the same."""
        num_roots, *of_layers = self.sizes
        return num_roots + min(sum(of_layers), self.forest_step.budget.max_drafts)


class GrowingForests(NamedTuple):
    """Forests on the device: N node entries of all layers, R rows, G forests."""

    words: torch.Tensor  # int32, the next three fields in one tensor, which the host reads once they have grown
    drafted: torch.Tensor  # [2, N] int32, see `parents` and `tokens`
    rows: torch.Tensor  # [N] int32
    tables: torch.Tensor  # [KV cache groups, R, columns] int32
    scores: torch.Tensor  # [N] float32, rank scores; -inf for unused entries
    ends: torch.Tensor  # [N] int32, tokens of the node's row in the cache up to and including it
    masks: torch.Tensor  # [N, words] int64, as `shared_rows.SharedAttentionTokens` has them
    slots: torch.Tensor  # [KV cache groups, N] int64
    counts: torch.Tensor  # [R] int32, nodes of each row
    totals: torch.Tensor  # [G, 2 + KV cache groups] int32: drafts, narrow nodes of the newest layer, spare blocks taken
    reached: torch.Tensor  # [KV cache groups, R] int32, the last column in which each row has a block
    spare: torch.Tensor  # [KV cache groups, G, most] int32 blocks, in the order in which they are taken

    @property
    def parents(self) -> torch.Tensor:
        """[N] int32, each an index in its forest's part of the previous layer; `NO_NODE` for unused entries."""
        return self.drafted[0]

    @property
    def tokens(self) -> torch.Tensor:
        """[N] int32; 0 for unused entries."""
        return self.drafted[1]


def forest_growth_plans(forest_steps: Sequence[ForestStep]) -> list[ForestGrowthPlan]:
    """Plans of forests that only have roots yet. Each layer of all forests precedes the next, forest by forest."""
    most_layers = max(forest_step.budget.num_layers for forest_step in forest_steps)
    parts: list[list[GrowthPart]] = [[] for _ in forest_steps]
    first = 0
    for number in range(most_layers + 1):
        for forest_step, of_forest in zip(forest_steps, parts, strict=True):
            count = forest_step.num_beams
            if number > 0:
                is_drafted = number <= forest_step.budget.num_layers
                count = min(forest_step.budget.draft_width, forest_step.num_open(number)) if is_drafted else 0
            of_forest.append(GrowthPart(first, count))
            first += count
        first = -(-first // ALIGNED) * ALIGNED
    rows = np.cumsum([0, *(forest_step.num_beams for forest_step in forest_steps)]).tolist()
    return [ForestGrowthPlan(*each) for each in zip(range(len(parts)), rows, forest_steps, parts, strict=False)]


def forest_growth_layer(plans: Sequence[ForestGrowthPlan], number: int) -> slice:
    """The entries of a layer of all forests."""
    first, last = plans[0].parts[number].first, plans[-1].parts[number]
    return slice(first, last.first + last.size)


def plant_forests(
    plans: Sequence[ForestGrowthPlan], more_arrays: Sequence[np.ndarray], device: torch.device
) -> tuple[GrowingForests, list[torch.Tensor]]:
    """Forests of roots on the device, with room for everything that they may become; by one copy.

    Args:
        plans: The forests' plans.
        more_arrays: Arrays that the same copy takes to the device.
        device: Where they grow.
    """
    forest_steps, num_forests = [plan.forest_step for plan in plans], len(plans)
    columns = max(table.shape[1] for forest_step in forest_steps for table in forest_step.blocks)
    num_rows, num_tables = plans[-1].rows.stop, len(forest_steps[0].blocks)
    num_nodes, columns = (-(-n // ALIGNED) * ALIGNED for n in (forest_growth_layer(plans, -1).stop, columns))
    num_words = -(-(1 + max(forest_step.budget.max_drafts for forest_step in forest_steps)) // WORD)
    most_spare = max(len(blocks) for forest_step in forest_steps for blocks in forest_step.spare_blocks)
    words = np.zeros(3 * num_nodes + num_tables * num_rows * columns, np.int32)
    drafted, rows, tables = _growth_parts_of(words, num_nodes, (num_tables, num_rows, columns))
    drafted[0] = NO_NODE
    tables[:] = NO_BLOCK
    scores, ends = np.full(num_nodes, NEVER, np.float32), np.zeros(num_nodes, np.int32)
    masks, slots = np.zeros((num_nodes, num_words), np.int64), np.zeros((num_tables, num_nodes), np.int64)
    counts, totals = np.ones(num_rows, np.int32), np.zeros((num_forests, NUM_TAKEN + num_tables), np.int32)
    reached = np.zeros((num_tables, num_rows), np.int32)
    spare = np.full((num_tables, num_forests, max(most_spare, 1)), NO_BLOCK, np.int32)
    for plan, forest_step in zip(plans, forest_steps, strict=True):
        roots, own, beams = plan.parts[0].nodes, plan.rows, np.arange(forest_step.num_beams)
        drafted[1, roots], scores[roots] = forest_step.forest.tokens, forest_step.layer.scores
        rows[roots], ends[roots], masks[roots, 0] = own.start + beams, forest_step.start + 1, 1
        totals[plan.place, NUM_NARROW] = forest_step.layer.num_narrow
        for number, (table, blocks) in enumerate(zip(forest_step.blocks, forest_step.spare_blocks, strict=True)):
            tables[number, own, : table.shape[1]] = table
            slots[number, roots] = forest_step.slots_of(number, beams, np.zeros_like(beams))
            has_block = table != NO_BLOCK
            reached[number, own] = table.shape[1] - 1 - has_block[:, ::-1].argmax(axis=1)
            spare[number, plan.place, : len(blocks)] = blocks[::-1]
    state = words, scores, ends, masks, slots, counts, totals, reached, spare
    words_on_device, *uploaded = uploaded_together_for_search([*state, *more_arrays], device)
    parts = _growth_parts_of(words_on_device, num_nodes, tables.shape)
    return GrowingForests(words_on_device, *parts, *uploaded[: len(state) - 1]), uploaded[len(state) - 1 :]


def _growth_parts_of(words: Any, num_nodes: int, of_tables: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Nodes, their rows and tables [KV cache groups, R, columns] as parts of an array of words, or of a tensor."""
    nodes, rest = words[: 3 * num_nodes].reshape(3, num_nodes), words[3 * num_nodes :]
    return nodes[:2], nodes[2], rest.reshape(of_tables)


def grown_forests_on_host(words: np.ndarray, growing: GrowingForests) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`drafted`, `rows` and `tables` from words that the host has read."""
    return _growth_parts_of(words, growing.drafted.shape[1], tuple(growing.tables.shape))


def draft_growing_layer(
    growing: GrowingForests, plan: ForestGrowthPlan, number: int, logprobs: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Drafts layer `number` of a forest, as `speculation.search.forest.draft_forest_layer` does.

    Args:
        growing: Written.
        plan: The forest's plan.
        number: From 1 on.
        logprobs: [nodes of the previous layer, n] float32, of the best tokens after each node, best first.
        tokens: [nodes of the previous layer, n] int64, these tokens.
    """
    before, part, totals = plan.parts[number - 1], plan.parts[number], growing.totals[plan.place]
    known = growing.scores[before.nodes, None]
    scores = logprobs + known
    scores = scores.where(scores > NEVER, NEVER).flatten()  # this also removes NaN
    by_rank = scores.argsort(descending=True, stable=True)
    is_narrow = (by_rank // logprobs.shape[1] < totals[NUM_NARROW]) & (scores[by_rank] > NEVER)
    is_narrow &= is_narrow.cumsum(0) <= plan.forest_step.num_beams
    chosen = by_rank[is_narrow.logical_not().byte().argsort(stable=True)][: part.size]
    own, ranks = slice(part.first, part.first + len(chosen)), search_arange(len(chosen), scores.device)
    exists = (scores[chosen] > NEVER) & (ranks < plan.forest_step.num_open(number) - totals[NUM_DRAFTS])
    growing.parents[own] = (chosen // logprobs.shape[1]).where(exists, NO_NODE).int()
    growing.tokens[own] = tokens.flatten()[chosen].where(exists, 0).int()
    growing.scores[own] = scores[chosen].where(exists, NEVER)
    count = exists.sum()
    totals[NUM_NARROW] = torch.minimum(is_narrow.sum(), count)
    totals[NUM_DRAFTS] += count


def place_growing_layer(
    growing: GrowingForests, plan: ForestGrowthPlan, number: int, block_sizes: Sequence[int]
) -> None:
    """Assigns rows, masks, blocks and slots to layer `number` of a forest. Unused entries see its forest's first root.

    Args:
        growing: Written.
        plan: The forest's plan.
        number: From 1 on.
        block_sizes: By KV cache group.
    """
    own, rows, start = plan.parts[number].nodes, plan.rows, plan.forest_step.start
    parents = growing.parents[own].long()
    exists, parents = parents != NO_NODE, parents.clamp(min=0) + plan.parts[number - 1].first
    of_nodes = growing.rows[parents].long().where(exists, rows.start)
    is_before = ((of_nodes[:, None] == of_nodes) & exists).tril(-1)
    places = (growing.counts[of_nodes] + is_before.sum(1)).where(exists, 0)
    growing.counts.index_add_(0, of_nodes, exists.int())
    words = search_arange(growing.masks.shape[1], places.device)
    bits = (torch.ones_like(places) << places % WORD)[:, None].where(words == (places // WORD)[:, None], 0)
    growing.masks[own] = growing.masks[parents].where(exists[:, None], 0) | bits
    growing.rows[own], growing.ends[own] = of_nodes.int(), (start + 1 + places).int()
    columns = search_arange(growing.tables.shape[2], places.device)
    for group, block_size in enumerate(block_sizes):
        taken, reached = growing.totals[plan.place, NUM_TAKEN + group], growing.reached[group, rows]
        needed = ((start + growing.counts[rows] - 1) // block_size - reached).clamp(min=0)
        first = taken + needed.cumsum(0) - needed
        ahead = columns - reached[:, None]  # columns after each row's last block
        spare = growing.spare[group, plan.place]
        blocks = spare[(first[:, None] + ahead - 1).clamp(0, len(spare) - 1)]
        table = growing.tables[group, rows]
        table.copy_(blocks.where((ahead > 0) & (ahead <= needed[:, None]), table))
        taken += needed.sum()
        reached += needed
        position = start + places
        held = growing.tables[group, of_nodes, position // block_size].long()
        growing.slots[group, own] = (held * block_size + position % block_size).where(exists, 0)
