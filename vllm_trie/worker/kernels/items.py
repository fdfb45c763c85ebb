"""A step along a catalog, in three launches; `search.strategies.best_continuations` has it in torch.

Rows have few continuations there: the children of a node. One program per row looks at the logits of these alone.
"""

from __future__ import annotations

from typing import cast

import torch
import triton
import triton.language as tl

from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.catalog import ConstraintAlongItems, ConstraintTrie, ItemConstraint
from vllm_trie.search.filters import NO_PRUNING
from vllm_trie.search.rules import SearchRules
from vllm_trie.search.step_result import NextSearchBeams, PackedSearchStep
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.worker.kernels import CHILDREN, SLOTS, KernelStepSizes, KernelVariants, TakeStep
from vllm_trie.worker.kernels.best import (
    SEMANTICS,
    into_slots_in_kernel,
    kernel_sizes_to_select,
    kernel_slots_of,
    kernel_slots_up_to,
    warps_to_select,
)
from vllm_trie.worker.kernels.order_keys import (
    KEY_UNIT,
    LAST_KEY,
    NUM_SCORE_BITS,
    cutoff_in_kernel,
    first_keys_in_kernel,
    keep_keys_in_kernel,
    key_score_in_kernel,
    order_key_in_kernel,
)
from vllm_trie.worker.kernels.tiles import (
    ALLOWED,
    BLOCK,
    MOST_PER_ROW,
    KernelLogits,
    can_filter_in_kernels,
    kernel_log_min_p,
    launch_tile_maxima,
    logprobs_in_kernel,
    normalise_in_kernel,
)
from vllm_trie.worker.launches import cdiv, next_power_of_2

ROOM = tl.constexpr(MOST_PER_ROW)  # for keys of a row
WARPS_TO_RANK = 4


def can_take_by_kernels(rules: SearchRules, sizes: KernelStepSizes) -> bool:
    """Whether a step by these rules is taken here; `wide_catalog` takes those of more beams, or children."""
    return kernels_take_items_alone(rules) and rules.width <= SLOTS[-1] and sizes.most_children <= CHILDREN[-1]


def kernels_take_items_alone(rules: SearchRules) -> bool:
    """Whether beams go along a catalog, each one item, and kernels know what else is asked."""
    items = rules.items
    if items is None or rules.constraints != (items,) or not items.is_plain:
        return False
    return (
        rules.strategy in SEMANTICS
        and (rules.pruning, rules.num_logprobs) == (NO_PRUNING, None)
        and can_filter_in_kernels(rules.filters)
        and (not rules.stops.strings or rules.stops.are_barred)
    )


class KernelStepAlongItems(TakeStep):
    """Takes a step by such rules."""

    def __init__(self, rules: SearchRules, sizes: KernelStepSizes) -> None:
        self._width, self._temperature = rules.width, rules.filters.temperature
        self._layout = layout = rules.layout(sizes.num_rows, sizes.vocab_size)
        self._num_words = layout.num_words
        count = layout.num_finished
        self._children = next(children for children in CHILDREN if children >= sizes.most_children)
        self._how_to_rank = sizes.num_rows, count, kernel_log_min_p(rules.filters)
        self._sizes_to_rank = kernel_sizes_to_rank_items(cdiv(sizes.vocab_size, BLOCK), self._children)
        num_bits = NUM_SCORE_BITS + (sizes.num_rows * self._children).bit_length()
        self._how_to_select, self._may_end = (sizes.num_rows, count, num_bits), not rules.stops.are_barred
        self._slots = kernel_slots_of(self._width)
        self._sizes = kernel_sizes_to_select(self._slots, self._slots)
        self._num_warps = warps_to_select(2 * self._sizes["lanes"])

    def __call__(
        self, logits: KernelLogits, beams: SearchBeams, places: torch.Tensor, sampled: torch.Tensor
    ) -> PackedSearchStep:
        """See `TakeStep`."""
        logits = logits._replace(temperature=self._temperature)
        (num_groups, num_rows), device = beams.scores.shape, places.device
        ((along, states),) = cast(dict[ConstraintAlongItems, torch.Tensor], beams.states).items()
        scores, states, trie = beams.scores.contiguous(), states.contiguous(), along.trie
        tiles = launch_tile_maxima(logits)
        keys = torch.empty(num_groups * num_rows, 2, ROOM.value, dtype=torch.int64, device=device)
        normal = torch.empty(num_groups * num_rows, 2, dtype=torch.float32, device=device)
        nodes = states, trie.first_child, trie.tokens
        _rank_items_kernel[num_groups * num_rows,](
            *logits.arguments, *tiles[3:], scores, *self._how_to_rank, *nodes, keys, normal,
            **self._sizes_to_rank, num_warps=WARPS_TO_RANK,
        )  # fmt: skip
        words = torch.empty(num_groups, self._num_words, dtype=torch.int32, device=device)
        order = torch.empty(num_groups, 2, 2, self._slots, dtype=torch.int64, device=device)
        parents, tokens, targets = torch.empty(3, num_groups, self._width, dtype=torch.int64, device=device)
        next_scores = torch.empty(num_groups, self._width, dtype=torch.float32, device=device)
        _select_items_kernel[num_groups,](
            keys, *self._how_to_select, *nodes, trie.is_item.view(torch.int8), self._width, order, parents, tokens,
            next_scores, targets, words, places, sampled, sampled.stride(0), self._may_end, self._children,
            **self._sizes, num_warps=self._num_warps,
        )  # fmt: skip
        return PackedSearchStep(
            NextSearchBeams(parents, tokens, next_scores, states={along: targets}), words, self._layout
        )


def kernel_sizes_to_rank_items(num_blocks: int, children: int) -> dict[str, int]:
    """What `_rank_items_kernel` is compiled for."""
    return {"blocks": next_power_of_2(num_blocks), "children": children}


@triton.jit(
    do_not_specialize=["vocab_size", "num_blocks", "num_rows", "count"],
    do_not_specialize_on_alignment=["index", "scores", "states"],
)
def _rank_items_kernel(
    logits, index, stride, vocab_size, classes, mixed, temperature, maxima, sums, num_blocks, scores, num_rows,
    count, log_min_p, states, first_child, node_tokens, keys, normal, blocks: tl.constexpr, children: tl.constexpr,
):  # fmt: skip
    """The best children of a row's node, and the best of those that have children: a program per row."""
    row, child = tl.program_id(0), tl.arange(0, children)
    normal += 2 * row
    score = normalise_in_kernel(maxima, sums, num_blocks, scores, row, normal, blocks)
    parent = tl.load(states + row)
    node = tl.load(first_child + parent) + child
    exists = node < tl.load(first_child + parent + 1)
    token = tl.load(node_tokens + node, mask=exists, other=0)
    values = logits + tl.load(index + row) * stride
    logprob = logprobs_in_kernel(values, normal, token, vocab_size, classes, temperature, ALLOWED)
    least = tl.max(tl.where(exists, logprob, float("-inf")), axis=0) + log_min_p
    logprob = tl.where(logprob < least, float("-inf"), logprob)
    own = tl.where(exists, order_key_in_kernel(logprob + score, (row % num_rows) * children + child), LAST_KEY)
    begin, end = (
        tl.load(first_child + node, mask=exists, other=0),
        tl.load(first_child + node + 1, mask=exists, other=0),
    )
    going = tl.where(begin < end, own, LAST_KEY)
    keys += row.to(tl.int64) * 2 * ROOM
    keep_keys_in_kernel(own, (own < LAST_KEY) & (own <= cutoff_in_kernel(own, count, 62)), keys, 0, ROOM)
    keep_keys_in_kernel(going, (going < LAST_KEY) & (going <= cutoff_in_kernel(going, count, 62)), keys + ROOM, 0, ROOM)


@triton.jit
def _nodes_in_kernel(key, states, first_child, children):
    """Where keys lead, and whether they lead anywhere."""
    exists = key < LAST_KEY
    place = tl.where(exists, key % KEY_UNIT, 0).to(tl.int32)
    parent = tl.load(states + place // children)
    node = tl.load(first_child + parent) + place % children
    return place // children, tl.where(exists, node, 0), tl.where(exists, key_score_in_kernel(key), float("-inf"))


@triton.jit(
    do_not_specialize=["num_rows", "count", "num_bits", "width", "sampled_stride", "may_end", "children"],
    do_not_specialize_on_alignment=["places", "states", "next_tokens", "targets", "sampled"],
)
def _select_items_kernel(
    keys, num_rows, count, num_bits, states, first_child, node_tokens, is_item, width, order, next_parents, next_tokens,
    next_scores, targets, words, places, sampled, sampled_stride, may_end, children, per_row: tl.constexpr,
    lanes: tl.constexpr, part: tl.constexpr, slots: tl.constexpr,
):  # fmt: skip
    """What is complete among the best finishes, the best that have children go on: a program per group."""
    group = tl.program_id(0).to(tl.int64)
    rank, slot, order = tl.arange(0, per_row), tl.arange(0, slots), order + group * 4 * per_row
    keys, states = keys + group * num_rows * 2 * ROOM, states + group * num_rows
    words += group * 3 * (width + count)
    floats = words + 2 * (width + count)
    key = first_keys_in_kernel(keys, 2 * ROOM, num_rows, count, num_bits, order, per_row, lanes, part)
    parent, node, score = _nodes_in_kernel(key, states, first_child, children)
    ends = (tl.load(is_item + node) != 0) & may_end
    is_ranked, ended = rank < count, words + 2 * width
    tl.store(ended + rank, parent, mask=is_ranked)
    tl.store(ended + count + rank, tl.load(node_tokens + node), mask=is_ranked)
    ended_with = tl.where(ends, score, float("-inf")).to(tl.int32, bitcast=True)
    tl.store(floats + width + rank, ended_with, mask=is_ranked)

    order += 2 * per_row
    key = first_keys_in_kernel(keys + ROOM, 2 * ROOM, num_rows, count, num_bits, order, per_row, lanes, part)
    parent, node, score = _nodes_in_kernel(key, states, first_child, children)
    chosen = into_slots_in_kernel(parent, (score > float("-inf")) & is_ranked, slot, width, per_row)
    is_slot, has_beam = slot < width, chosen < per_row
    own = tl.load(order + per_row + tl.minimum(chosen, count - 1))
    own_parent, own_node, own_score = _nodes_in_kernel(own, states, first_child, children)
    own_parent = tl.where(has_beam, own_parent, tl.minimum(slot, num_rows - 1))
    own_score = tl.where(has_beam, own_score, float("-inf"))
    own_token = tl.maximum(tl.load(node_tokens + own_node), 0)  # the root, where there is no beam, has none
    by_slot = group * width + slot
    tl.store(next_parents + by_slot, own_parent.to(tl.int64), mask=is_slot)
    tl.store(next_tokens + by_slot, own_token.to(tl.int64), mask=is_slot)
    tl.store(next_scores + by_slot, own_score, mask=is_slot)
    tl.store(targets + by_slot, own_node.to(tl.int64), mask=is_slot)
    tl.store(words + slot, own_parent, mask=is_slot)
    tl.store(words + width + slot, own_token, mask=is_slot)
    tl.store(floats + slot, own_score.to(tl.int32, bitcast=True), mask=is_slot)
    is_placed = is_slot & (slot < num_rows)
    row = tl.load(places + group * num_rows + slot, mask=is_placed, other=0)
    tl.store(sampled + row * sampled_stride, own_token.to(tl.int64), mask=is_placed)


def warm_up_kernels(serving: KernelVariants) -> None:
    """Take a step for each number of slots, and of children."""
    nothing, rules = torch.zeros(2, dtype=torch.int64, device=serving.device), ItemConstraint("")
    for most_children in CHILDREN:
        trie = ConstraintTrie(nothing.int(), nothing.int(), nothing.bool(), [most_children])
        along, row = rules.on({"": trie}, ()), nothing[:1]
        beams = SearchBeams(torch.zeros(1, 1, device=serving.device), states={along: row[None]})
        for slots in kernel_slots_up_to(serving.most_beams):
            for logits in serving.logits:
                of_items = SearchRules(slots, BestStrategy(), constraints=(rules,))
                take = KernelStepAlongItems(of_items, KernelStepSizes.of(beams, logits.shape[1]))
                take(KernelLogits.of(logits, row), beams, row, row[None].clone())
