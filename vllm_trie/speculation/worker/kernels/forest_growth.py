"""Grows a layer of searched forests in two launches, besides those that rank the draft model's tokens.

`speculation.worker.forest_growth` has both in torch, for forests of any width under any constraint.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_trie.messages import MOST_DRAFTS
from vllm_trie.search.devices import search_arange
from vllm_trie.search.rank import SCORE_UNIT
from vllm_trie.speculation.worker.forest_growth import (
    NO_NODE,
    NUM_DRAFTS,
    NUM_NARROW,
    NUM_TAKEN,
    ForestGrowthPlan,
    GrowingForests,
)
from vllm_trie.speculation.worker.kernels import drafts
from vllm_trie.worker.kernels import SLOTS, KernelVariants
from vllm_trie.worker.kernels.decide import KEYS_AT_A_TIME, warps_to_select
from vllm_trie.worker.kernels.order_keys import (
    KEY_UNIT,
    LAST_KEY,
    NUM_SCORE_BITS,
    cutoff_in_kernel,
    is_among_in_kernel,
    keep_keys_in_kernel,
    key_score_in_kernel,
    order_key_in_kernel,
    sort_keys_in_kernel,
)
from vllm_trie.worker.kernels.tiles import kernels_rank_rows

MOST_ENDS = 3  # tokens after which no beam continues, which are ranked with all others
SIZES = [(slots, factor * slots) for slots in SLOTS for factor in (1, 2)]  # nodes of a layer, and tokens of each
LANES = 16, 64, 256, MOST_DRAFTS  # nodes of a layer, or rows of a group, that the second kernel is compiled for
NODES_AT_A_TIME = 16  # of the others, with which a node is compared
NONE, DRAFTS, NARROW, TAKEN = (tl.constexpr(n) for n in (NO_NODE, NUM_DRAFTS, NUM_NARROW, NUM_TAKEN))
NUM_ABOUT = 12  # columns of what kernels know of a layer of a forest
ABOUT = tl.constexpr(NUM_ABOUT)
AFTER_ALL = tl.constexpr(SCORE_UNIT**2)  # added to keys that must sort after all other order keys


class ForestGrowthKernels:
    """Grows the forests of one step.

    Args:
        plans: The forests' plans.
        block_sizes: By KV cache group.
    """

    def __init__(self, plans: Sequence[ForestGrowthPlan], block_sizes: Sequence[int]) -> None:
        self._plans = plans
        self._is_ranked = [_is_drafted_by_kernels(plan) for plan in plans]
        num_layers, stops = len(plans[0].parts) - 1, list[int]()
        about = np.zeros((num_layers, len(plans), NUM_ABOUT), np.int32)
        for number, plan in ((n, p) for n in range(1, num_layers + 1) for p in plans):
            forest_step, budget = plan.forest_step, plan.forest_step.budget
            if number <= budget.num_layers:
                ends = forest_step.rules[number - 1].stops.last_token_ids if self._is_ranked[plan.place] else ()
                parts = *plan.parts[number - 1], *plan.parts[number]
                of_rules = forest_step.num_beams, budget.draft_width, len(stops), len(ends)
                of_rows = self._is_ranked[plan.place], plan.first_row, forest_step.start
                about[number - 1, plan.place] = *parts, forest_step.num_open(number), *of_rules, *of_rows
                stops += ends
        self.arrays: list[np.ndarray] = [about, np.array(stops or [NO_NODE], np.int64), np.array(block_sizes, np.int32)]
        self.on_device: list[torch.Tensor] = []  # `arrays`, once they are on the device

    def draft(self, growing: GrowingForests, logits: torch.Tensor, number: int) -> set[int]:
        """Drafts layer `number` of all forests whose tokens kernels can rank. Returns their places.

        Args:
            growing: Written.
            logits: [nodes of the previous layer, V].
            number: From 1 on.
        """
        active = [plan for plan in self._plans if plan.forest_step.budget.num_layers >= number]
        ranked, (about, stops, _) = [plan for plan in active if self._is_ranked[plan.place]], self.on_device
        count = max((_num_ranked_by_draft_kernels(plan, number, logits.shape[1]) for plan in ranked), default=0)
        if not ranked or not kernels_rank_rows(count, logits.shape[1]):
            return set()
        sizes = kernel_sizes_to_draft(max(map(_widest_in_growth_kernels, ranked)), count)
        keys = drafts.launch_best_drafts(logits, search_arange(len(logits), logits.device), count, sizes["per_row"])
        first = active[0].parts[number - 1].first
        launch_draft_nodes(growing, (keys, logits.shape[1], first), about[number - 1, : len(active)], stops, sizes)
        return {plan.place for plan in ranked}

    def best(
        self, plan: ForestGrowthPlan, logits: torch.Tensor, nodes: slice, number: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`best_drafts.rank_drafts_after_nodes` for a forest that is too wide for `draft`; None if torch must rank.

        Args:
            plan: The forest's plan.
            logits: [nodes of the previous layer, V], of all forests.
            nodes: The forest's nodes among them.
            number: From 1 on.
        """
        count = _num_ranked_by_draft_kernels(plan, number, logits.shape[1])
        if not _is_plain_to_draft_kernels(plan) or not kernels_rank_rows(count, logits.shape[1]):
            return None
        own = search_arange(len(logits), logits.device)[nodes]
        keys = drafts.launch_best_drafts(logits, own, count, drafts.kept_by_draft_kernels(count))
        return drafts.decode_draft_kernel_keys(keys, plan.forest_step.rules[number - 1].stops.last_token_ids)

    def place(self, growing: GrowingForests, number: int, num_forests: int) -> bool:
        """`forest_growth.place_growing_layer` for layer `number` of the first forests; False if one is too wide."""
        widest = max(map(_widest_in_growth_kernels, self._plans[:num_forests]))
        if widest > LANES[-1]:
            return False
        about, _, block_sizes = self.on_device
        launch_place_nodes(growing, about[number - 1, :num_forests], block_sizes, kernel_lanes_to_draft(widest))
        return True


def launch_draft_nodes(
    growing: GrowingForests,
    ranked: tuple[torch.Tensor, int, int],
    about: torch.Tensor,
    stops: torch.Tensor,
    sizes: dict[str, int],
) -> None:
    """Drafts a layer of each forest, as `forest_growth.draft_growing_layer` does.

    Args:
        growing: Written.
        ranked: Order keys [nodes, P] of the best tokens after each node of the previous layers, the vocabulary size,
            and the first of these nodes among all. The keys are overwritten.
        about: [forests, NUM_ABOUT] int32.
        stops: Tokens after which no beam continues, of all forests.
        sizes: See `kernel_sizes_to_draft`.
    """
    (keys, vocab_size, first), num_bits = ranked, NUM_SCORE_BITS + (sizes["slots"] * ranked[1]).bit_length()
    order = torch.empty(len(about), 2, sizes["slots"], dtype=torch.int64, device=keys.device)
    _draft_nodes_kernel[len(about),](
        *(keys, vocab_size, num_bits, about, stops, first, order),
        *(growing.parents, growing.tokens, growing.scores, growing.totals, growing.totals.shape[1]),
        **sizes,
        num_warps=warps_to_select(sizes["lanes"]),
    )


def launch_place_nodes(growing: GrowingForests, about: torch.Tensor, block_sizes: torch.Tensor, lanes: int) -> None:
    """`forest_growth.place_growing_layer` for a layer of each forest; `lanes`: see `kernel_lanes_to_draft`."""
    num_tables, num_rows, columns = growing.tables.shape
    _place_draft_nodes_kernel[len(about),](
        *(about, growing.parents, growing.rows, growing.ends, growing.masks, growing.masks.shape[1]),
        *(growing.slots, growing.slots.shape[1], growing.counts, growing.totals, growing.totals.shape[1]),
        *(growing.tables, num_rows, columns, growing.reached, growing.spare, *growing.spare.shape[1:]),
        *(block_sizes, num_tables),
        lanes=lanes,
        chunk=NODES_AT_A_TIME,
        num_warps=warps_to_place_drafts(lanes),
    )


def _is_drafted_by_kernels(plan: ForestGrowthPlan) -> bool:
    """Whether kernels draft all layers of a forest."""
    return _is_plain_to_draft_kernels(plan) and _widest_in_growth_kernels(plan) <= SLOTS[-1]


def _is_plain_to_draft_kernels(plan: ForestGrowthPlan) -> bool:
    """Whether drafts compete only by the draft model's log-probabilities, and few tokens may end a hypothesis."""
    forest_step = plan.forest_step
    return not forest_step.states and all(
        rules.filters.temperature == 1.0 and len(rules.stops.last_token_ids) <= MOST_ENDS for rules in forest_step.rules
    )


def _widest_in_growth_kernels(plan: ForestGrowthPlan) -> int:
    """The most nodes of a layer, or rows."""
    return max(plan.forest_step.num_beams, plan.forest_step.budget.draft_width)


def _num_ranked_by_draft_kernels(plan: ForestGrowthPlan, number: int, vocab_size: int) -> int:
    """How many tokens of each node must be ranked, including those that end hypotheses."""
    stops = plan.forest_step.rules[number - 1].stops.last_token_ids
    return min(plan.forest_step.budget.draft_width + len(stops), vocab_size)


def kernel_sizes_to_draft(widest: int, count: int) -> dict[str, int]:
    """Sizes that `_draft_nodes_kernel` is compiled for: for layers of `widest` nodes, and `count` tokens after each."""
    kept = drafts.kept_by_draft_kernels(count)
    slots, per_row = next(each for each in SIZES if each[0] >= widest and each[1] >= kept)
    lanes = slots * per_row
    return {"per_row": per_row, "lanes": lanes, "part": min(lanes, KEYS_AT_A_TIME), "slots": slots}


def kernel_lanes_to_draft(widest: int) -> int:
    """The size that `_place_draft_nodes_kernel` is compiled for."""
    return next(lanes for lanes in LANES if lanes >= widest)


def warps_to_place_drafts(lanes: int) -> int:
    """Warps of a program of `_place_draft_nodes_kernel`."""
    return 4 if lanes <= 64 else 8 if lanes <= 256 else 16


@triton.jit(do_not_specialize=["vocab_size", "num_bits", "first_of_layer", "num_totals"])
def _draft_nodes_kernel(
    keys, vocab_size, num_bits, about, stops, first_of_layer, order, parents, tokens, scores, totals, num_totals,
    per_row: tl.constexpr, lanes: tl.constexpr, part: tl.constexpr, slots: tl.constexpr,
):  # fmt: skip
    """See `launch_draft_nodes`: a program per forest.

    Args:
        keys: [nodes of the layers before, per_row]. Overwritten.
        about: [forests, ABOUT], see `ForestGrowthKernels`.
        order: [forests, 2, slots], room.
        parents, tokens, scores: [N].
        totals: [forests, num_totals].
    """
    group = tl.program_id(0).to(tl.int64)
    about, totals, order = about + group * ABOUT, totals + group * num_totals, order + group * 2 * slots
    first_before, num_before = tl.load(about).to(tl.int64), tl.load(about + 1)
    first, count = tl.load(about + 2).to(tl.int64), tl.load(about + 3)
    num_drafts, num_narrow = tl.load(totals + DRAFTS), tl.load(totals + NARROW)
    room, width, draft_width = tl.load(about + 4) - num_drafts, tl.load(about + 5), tl.load(about + 6)
    if tl.load(about + 9) != 0:
        lane = tl.arange(0, lanes)
        node, is_lane = lane // per_row, lane // per_row < num_before
        keys += (first_before - first_of_layer) * per_row
        ranked = tl.load(keys + lane, mask=is_lane, other=LAST_KEY)
        known = tl.load(scores + first_before + node, mask=is_lane, other=float("-inf"))
        token = tl.where(ranked < LAST_KEY, ranked % KEY_UNIT, 0)
        score = tl.where(ranked < LAST_KEY, key_score_in_kernel(ranked), float("-inf")) + known
        goes_on = (ranked < LAST_KEY) & (known > float("-inf")) & (score > float("-inf"))
        goes_on = goes_on & (is_among_in_kernel(token, stops + tl.load(about + 7), tl.load(about + 8)) == 0)
        key = tl.where(goes_on, order_key_in_kernel(score, node.to(tl.int64) * vocab_size + token), LAST_KEY)
        of_narrow = tl.where(node < num_narrow, key, LAST_KEY)
        last_narrow = cutoff_in_kernel(of_narrow, width, num_bits)
        is_narrow = (of_narrow < LAST_KEY) & (of_narrow <= last_narrow)
        num_first = tl.sum(is_narrow.to(tl.int32), axis=0)
        num_others = tl.maximum(draft_width - num_first, 0)
        others = tl.where(is_narrow, LAST_KEY, key)
        last_other = cutoff_in_kernel(others, num_others, num_bits)
        is_other = (others < LAST_KEY) & (others <= last_other) & (num_others > 0)
        # The narrow beam's come first, then the others; what is left out comes last.
        in_turn = tl.where(is_narrow, key, tl.where(is_other, key + AFTER_ALL, LAST_KEY))
        tl.debug_barrier()
        tl.store(keys + lane, in_turn, mask=is_lane)
        tl.debug_barrier()

        num_kept = 0
        for start in range(0, lanes, part):
            at = start + tl.arange(0, part)
            some = tl.load(keys + at, mask=at // per_row < num_before, other=LAST_KEY)
            num_kept = keep_keys_in_kernel(some, some < LAST_KEY, order, num_kept, slots)
        rank = tl.arange(0, slots)
        chosen = sort_keys_in_kernel(tl.load(order + rank), rank, order + slots)
        num_drafted = tl.maximum(tl.minimum(tl.minimum(num_kept, draft_width), room), 0)
        exists = rank < num_drafted
        own = tl.where(chosen >= AFTER_ALL, chosen - AFTER_ALL, chosen)
        place = own % KEY_UNIT
        is_own = rank < count
        tl.store(parents + first + rank, tl.where(exists, (place // vocab_size).to(tl.int32), NONE), mask=is_own)
        tl.store(tokens + first + rank, tl.where(exists, (place % vocab_size).to(tl.int32), 0), mask=is_own)
        tl.store(scores + first + rank, tl.where(exists, key_score_in_kernel(own), float("-inf")), mask=is_own)
        tl.store(totals + DRAFTS, num_drafts + num_drafted)
        tl.store(totals + NARROW, tl.minimum(num_first, num_drafted))


@triton.jit(
    do_not_specialize=[
        *("num_words", "num_nodes", "num_totals", "num_rows", "columns", "num_forests", "most_spare", "num_tables"),
    ]
)
def _place_draft_nodes_kernel(
    about, parents, rows, ends, masks, num_words, slots, num_nodes, counts, totals, num_totals, tables, num_rows,
    columns, reached, spare, num_forests, most_spare, block_sizes, num_tables, lanes: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """See `forest_growth.place_growing_layer`: a program per forest. Arguments are as `GrowingForests` has them.

    Args:
        about: [forests, ABOUT], see `ForestGrowthKernels`.
        block_sizes: [num_tables].
    """
    group = tl.program_id(0).to(tl.int64)
    about, totals = about + group * ABOUT, totals + group * num_totals
    first_before, first, count = tl.load(about).to(tl.int64), tl.load(about + 2).to(tl.int64), tl.load(about + 3)
    width, first_row, start = tl.load(about + 5), tl.load(about + 10).to(tl.int64), tl.load(about + 11)
    node = tl.arange(0, lanes)  # and row
    is_node, is_row = node < count, node < width
    parent = tl.load(parents + first + node, mask=is_node, other=NONE)
    exists = parent != NONE
    before = first_before + tl.maximum(parent, 0)
    row = tl.load(rows + before, mask=exists, other=0)
    row = tl.where(exists, row, first_row)
    tl.store(rows + first + node, row, mask=is_node)
    tl.debug_barrier()

    num_same, num_added = tl.zeros([lanes], tl.int32), tl.zeros([lanes], tl.int32)
    for at in range(0, count, chunk):
        other = at + tl.arange(0, chunk)
        is_there = tl.load(parents + first + other, mask=other < count, other=NONE) != NONE
        of_other = tl.where(is_there, tl.load(rows + first + other, mask=is_there, other=0), -1)
        is_same = (of_other[None, :] == row[:, None]) & (other[None, :] < node[:, None])
        num_same += tl.sum(is_same.to(tl.int32), axis=1)
        num_added += tl.sum((of_other[None, :] == first_row + node[:, None]).to(tl.int32), axis=1)
    place = tl.where(exists, tl.load(counts + row, mask=exists, other=0) + num_same, 0)
    num_own = tl.load(counts + first_row + node, mask=is_row, other=1) + num_added
    tl.debug_barrier()
    tl.store(counts + first_row + node, num_own, mask=is_row)
    tl.store(ends + first + node, start + 1 + place, mask=is_node)
    for word in range(num_words):
        seen = tl.load(masks + before * num_words + word, mask=exists, other=0)
        bit = tl.full([lanes], 1, tl.int64) << (place % 64).to(tl.int64)
        own = seen | tl.where(place // 64 == word, bit, 0)
        tl.store(masks + (first + node) * num_words + word, own, mask=is_node)

    for table in range(num_tables):
        block_size = tl.load(block_sizes + table)
        own_reached = reached + table * num_rows + first_row + node
        last, taken = tl.load(own_reached, mask=is_row, other=0), tl.load(totals + TAKEN + table)
        needed = tl.where(is_row, tl.maximum((start + num_own - 1) // block_size - last, 0), 0)
        blocks = spare + (table * num_forests + group) * most_spare + taken + tl.cumsum(needed, axis=0) - needed
        of_table = tables + tl.full([], table, tl.int64) * num_rows * columns
        for at in range(tl.max(needed, axis=0)):
            takes = at < needed
            block = tl.load(blocks + at, mask=takes, other=0)
            tl.store(of_table + (first_row + node) * columns + last + 1 + at, block, mask=takes)
        tl.debug_barrier()
        tl.store(own_reached, last + needed, mask=is_row)
        tl.store(totals + TAKEN + table, taken + tl.sum(needed, axis=0))
        position = start + place
        held = tl.load(of_table + row * columns + position // block_size, mask=exists, other=0).to(tl.int64)
        slot = tl.where(exists, held * block_size + position % block_size, 0)
        tl.store(slots + tl.full([], table, tl.int64) * num_nodes + first + node, slot, mask=is_node)


def nothing_growing_in_kernels(device: torch.device) -> GrowingForests:
    """Arrays of the types that kernels are compiled for, without any node."""

    def zeros(kind: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    ints, longs = torch.int32, torch.int64
    of_nodes = zeros(ints, 2, 4), zeros(ints, 4), zeros(ints, 1, 1, 1), zeros(torch.float32, 1), zeros(ints, 1)
    of_tables = zeros(ints, 1, 1), zeros(ints, 1, 1, 1)
    of_rows = zeros(ints, 1), zeros(ints, 1, NUM_TAKEN + 1), *of_tables
    return GrowingForests(zeros(ints, 1), *of_nodes, zeros(longs, 1, 1), zeros(longs, 1, 1), *of_rows)


def warm_up_growth_kernels(serving: KernelVariants) -> None:
    """Grows a layer without nodes, for every size."""
    if not serving.draft_logits:
        return
    growing, zeros = nothing_growing_in_kernels(serving.device), partial(torch.zeros, device=serving.device)
    about, stops = zeros(1, NUM_ABOUT, dtype=torch.int32), zeros(1, dtype=torch.int64)
    block_sizes = torch.ones(1, dtype=torch.int32, device=serving.device)
    for slots, per_row in SIZES:
        keys = zeros(1, per_row, dtype=torch.int64)
        launch_draft_nodes(growing, (keys, 1, 0), about, stops, kernel_sizes_to_draft(slots, per_row))
    for lanes in LANES:
        launch_place_nodes(growing, about, block_sizes, lanes)
