"""A step of many beams along a catalog, in five launches and two of `torch.topk`; or of nodes with many children.

`search.strategies.best_continuations` has it in torch. As in `wide_keys`, the best K tiles, here of children of rows'
nodes, hold the best K children. What finishes and what goes on are ranked apart, but together by the same launches.
"""

from __future__ import annotations

from typing import cast

import torch
import triton
import triton.language as tl

from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.catalog import ConstraintAlongItems, ConstraintTrie, ItemConstraint
from vllm_trie.search.rank import TILE
from vllm_trie.search.rules import SearchRules
from vllm_trie.search.step_result import NextSearchBeams, PackedSearchStep
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.worker.kernels import KernelStepSizes, KernelVariants, TakeStep
from vllm_trie.worker.kernels.best import write_ended_in_kernel
from vllm_trie.worker.kernels.items import kernels_take_items_alone
from vllm_trie.worker.kernels.order_keys import LAST_KEY, order_key_in_kernel
from vllm_trie.worker.kernels.tiles import (
    ALLOWED,
    BLOCK,
    KernelLogits,
    kernel_log_min_p,
    launch_tile_maxima,
    logprobs_in_kernel,
    normalise_in_kernel,
)
from vllm_trie.worker.kernels.wide import clear_slots_in_kernel, put_beams_in_kernel
from vllm_trie.worker.kernels.wide_keys import (
    KEYS_AT_A_TIME,
    OF_ROW,
    WARPS_TO_SPLIT,
    kernel_keys_in_order,
    kernels_have_keys,
    parts_in_kernel,
    split_kernel_keys,
)
from vllm_trie.worker.kernels.wide_slots import (
    NUM_WARPS,
    PART,
    continuations_in_kernel,
    going_on_in_kernel,
    launch_find_first_children,
    list_dead_in_kernel,
    slots_in_kernel,
)
from vllm_trie.worker.launches import cdiv, next_power_of_2

CHILDREN_AT_A_TIME = 256  # that a program looks at
WARPS_TO_RANK = 4


def can_take_by_kernels(rules: SearchRules, sizes: KernelStepSizes) -> bool:
    """Whether a step by these rules is taken here; else torch takes it."""
    return kernels_take_items_alone(rules) and kernels_have_keys(rules.width, _kernel_room_for_children(sizes))


def _kernel_room_for_children(sizes: KernelStepSizes) -> int:
    """Places for the children of a row's node: whole tiles."""
    return cdiv(sizes.most_children, TILE) * TILE


class KernelWideStepAlongItems(TakeStep):
    """Takes a step by such rules."""

    def __init__(self, rules: SearchRules, sizes: KernelStepSizes) -> None:
        self._width, self._temperature = rules.width, rules.filters.temperature
        self._layout = layout = rules.layout(sizes.num_rows, sizes.vocab_size)
        self._num_words = layout.num_words
        self._count, self._room = layout.num_finished, _kernel_room_for_children(sizes)
        self._how_to_rank = sizes.num_rows, self._room, kernel_log_min_p(rules.filters)
        self._sizes, self._may_end = (
            kernel_sizes_to_rank_tiles(cdiv(sizes.vocab_size, BLOCK)),
            not rules.stops.are_barred,
        )

    def __call__(
        self, logits: KernelLogits, beams: SearchBeams, places: torch.Tensor, sampled: torch.Tensor
    ) -> PackedSearchStep:
        """See `TakeStep`."""
        (num_groups, num_rows), device, width = beams.scores.shape, places.device, self._width
        ((along, states),) = cast(dict[ConstraintAlongItems, torch.Tensor], beams.states).items()
        states, trie = states.contiguous(), along.trie
        nodes = states, trie.first_child, trie.tokens
        keys = self._best_items(logits._replace(temperature=self._temperature), beams.scores.contiguous(), nodes)
        count = keys.shape[1]
        words = torch.empty(num_groups, self._num_words, dtype=torch.int32, device=device)
        parents, tokens, targets = torch.empty(3, num_groups, width, dtype=torch.int64, device=device)
        by_slot = parents, tokens, torch.empty(num_groups, width, dtype=torch.float32, device=device)
        slots = launch_find_first_children(keys[num_groups:], self._room, width, count)
        _select_wide_items_kernel[num_groups,](
            keys, num_rows, self._room, count, width, self._count, *nodes, trie.is_item.view(torch.int8), self._may_end,
            *slots, *by_slot, targets, words, places, sampled, sampled.stride(0), part=PART, num_warps=NUM_WARPS,
        )  # fmt: skip
        return PackedSearchStep(NextSearchBeams(*by_slot, states={along: targets}), words, self._layout)

    def _best_items(self, logits: KernelLogits, scores: torch.Tensor, nodes: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """[2 * G, K] int64, order keys, in order: of each group's best children, then of its best that have some.

        Args:
            logits, scores: Of all rows.
            nodes: Where they are, and what of the trie says where these lead.
        """
        (num_groups, num_rows), tiles, num_lists = scores.shape, launch_tile_maxima(logits), 2 * len(scores)
        of_rows = torch.empty(scores.numel(), OF_ROW.value, dtype=torch.float32, device=scores.device)
        keys = torch.empty(num_lists, num_rows * self._room // TILE, dtype=torch.int64, device=scores.device)
        _rank_item_tiles_kernel[scores.numel(),](
            *logits.arguments, *tiles[3:], scores, *self._how_to_rank, *nodes, keys, of_rows, **self._sizes,
            num_warps=WARPS_TO_RANK,
        )  # fmt: skip
        chosen, keys = split_kernel_keys(keys, self._count, TILE)
        _rank_items_of_tiles_kernel[cdiv(keys.shape[1], KEYS_AT_A_TIME), num_lists](
            *logits.arguments, chosen, chosen.shape[1], of_rows, num_groups, num_rows, self._room, *nodes, keys,
            tile=TILE, lanes=KEYS_AT_A_TIME, num_warps=WARPS_TO_SPLIT,
        )  # fmt: skip
        return kernel_keys_in_order(keys, min(self._count, keys.shape[1]))


def kernel_sizes_to_rank_tiles(num_blocks: int) -> dict[str, int]:
    """What `_rank_item_tiles_kernel` is compiled for."""
    return {"blocks": next_power_of_2(num_blocks), "tile": TILE, "part": CHILDREN_AT_A_TIME}


@triton.jit
def item_keys_in_kernel(
    node, exists, place, values, of_rows, least, score, first_child, node_tokens, vocab_size, classes, temperature
):  # fmt: skip
    """Order keys of children, and the same of those that have children."""
    token = tl.load(node_tokens + node, mask=exists, other=0)
    logprob = logprobs_in_kernel(values, of_rows, token, vocab_size, classes, temperature, ALLOWED)
    logprob = tl.where(logprob < least, float("-inf"), logprob)
    own = tl.where(exists, order_key_in_kernel(logprob + score, place), LAST_KEY)
    begin = tl.load(first_child + node, mask=exists, other=0)
    end = tl.load(first_child + node + 1, mask=exists, other=0)
    return own, tl.where(begin < end, own, LAST_KEY)


@triton.jit(
    do_not_specialize=["vocab_size", "num_blocks", "num_rows", "room"],
    do_not_specialize_on_alignment=["index", "scores", "states"],
)
def _rank_item_tiles_kernel(
    logits, index, stride, vocab_size, classes, mixed, temperature, maxima, sums, num_blocks, scores, num_rows,
    room, log_min_p, states, first_child, node_tokens, keys, of_rows, blocks: tl.constexpr, tile: tl.constexpr, part:
    tl.constexpr,
):  # fmt: skip
    """The keys of the best of each tile of children of a row's node, and of the best that have children themselves.

    A program per row.

    Args:
        keys: [2, R, room / tile].
        of_rows: [R, OF_ROW].
    """
    row, num_rows_in_all, num_tiles = tl.program_id(0).to(tl.int64), tl.num_programs(0), room // tile
    of_rows += row * OF_ROW
    score = normalise_in_kernel(maxima, sums, num_blocks, scores, row, of_rows, blocks)
    values, parent = logits + tl.load(index + row) * stride, tl.load(states + row)
    first, end = tl.load(first_child + parent), tl.load(first_child + parent + 1)
    least = tl.sum(tl.zeros([part], tl.float32), axis=0) + float("-inf")
    if log_min_p > float("-inf"):
        for start in range(0, room, part):
            node = first + start + tl.arange(0, part)
            token = tl.load(node_tokens + node, mask=node < end, other=0)
            logprob = logprobs_in_kernel(values, of_rows, token, vocab_size, classes, temperature, ALLOWED)
            least = tl.maximum(least, tl.max(tl.where(node < end, logprob, float("-inf")), axis=0))
        least += log_min_p
    tl.store(of_rows + 2, least)
    tl.store(of_rows + 3, score)
    keys += row * num_tiles
    for start in range(0, room, part):
        child = start + tl.arange(0, part)
        exists = (child < room) & (first + child < end)
        own, going = item_keys_in_kernel(
            first + child, exists, (row % num_rows) * room + child, values, of_rows, least, score, first_child,
            node_tokens, vocab_size, classes, temperature,
        )  # fmt: skip
        at = start // tile + tl.arange(0, part // tile)
        best = tl.min(tl.reshape(own, [part // tile, tile]), axis=1)
        tl.store(keys + at, best, mask=at < num_tiles)
        best = tl.min(tl.reshape(going, [part // tile, tile]), axis=1)
        tl.store(keys + num_rows_in_all * num_tiles + at, best, mask=at < num_tiles)


@triton.jit(
    do_not_specialize=["vocab_size", "num_chosen", "num_groups", "num_rows", "room"],
    do_not_specialize_on_alignment=["index", "states"],
)
def _rank_items_of_tiles_kernel(
    logits, index, stride, vocab_size, classes, mixed, temperature, chosen, num_chosen, of_rows, num_groups,
    num_rows, room, states, first_child, node_tokens, keys, tile: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Make order keys of the children in chosen tiles: programs per part of these and list of a group."""
    number = tl.program_id(1).to(tl.int64)
    place_of_best, child, exists, at, has_room = parts_in_kernel(chosen, num_chosen, tile, lanes)
    place = place_of_best // tile * tile + child
    row, child = place // room, place % room
    of_row = number % num_groups * num_rows + row
    parent = tl.load(states + of_row)
    node = tl.load(first_child + parent) + child
    exists &= node < tl.load(first_child + parent + 1)
    values, of_rows = logits + tl.load(index + of_row) * stride, of_rows + of_row * OF_ROW
    own, going = item_keys_in_kernel(
        node, exists, place, values, of_rows, tl.load(of_rows + 2), tl.load(of_rows + 3), first_child, node_tokens,
        vocab_size, classes, temperature,
    )  # fmt: skip
    tl.store(keys + number * num_chosen * tile + at, tl.where(number < num_groups, own, going), mask=has_room)


@triton.jit
def nodes_in_kernel(parent, child, score, states, first_child):
    """Nodes that continuations lead to; the root where there is none."""
    node = tl.load(first_child + tl.load(states + parent)) + child
    return tl.where(score > float("-inf"), node, 0)


@triton.jit(
    do_not_specialize=["num_rows", "room", "count", "width", "num_ended", "may_end", "sampled_stride"],
    do_not_specialize_on_alignment=["states", "dead", "places", "next_tokens", "targets", "sampled"],
)
def _select_wide_items_kernel(
    keys, num_rows, room, count, width, num_ended, states, first_child, node_tokens, is_item, may_end, first_children,
    dead, next_parents, next_tokens, next_scores, targets, words, places, sampled, sampled_stride, part: tl.constexpr,
):  # fmt: skip
    """What is complete among the best finishes, the best that have children go on: a program per group."""
    group = tl.program_id(0).to(tl.int64)
    over, live = keys + group * count, keys + (tl.num_programs(0) + group) * count
    states, places = states + group * num_rows, places + group * num_rows
    words, num_ints = words + group * 3 * (width + num_ended), 2 * (width + num_ended)
    first_children, dead, targets = first_children + group * width, dead + group * width, targets + group * width
    next_parents += group * width
    next_tokens += group * width
    next_scores += group * width
    clear_slots_in_kernel(
        next_parents, next_tokens, next_scores, words, num_ints, width, places, sampled, sampled_stride, num_rows, part
    )  # fmt: skip
    for start in range(0, width, part):
        slot = start + tl.arange(0, part)
        tl.store(targets + slot, tl.zeros([part], tl.int64), mask=slot < width)
    list_dead_in_kernel(first_children, dead, width, count, part)
    num_living, num_others = 0, 0
    for start in range(0, num_ended, part):
        rank = start + tl.arange(0, part)
        parent, child, score = continuations_in_kernel(over, rank, count, room)
        node = nodes_in_kernel(parent, child, score, states, first_child)
        ends = (tl.load(is_item + node) != 0) & may_end
        token, ended_with = tl.load(node_tokens + node), tl.where(ends, score, float("-inf"))
        write_ended_in_kernel(
            words, num_ints, width, num_ended, rank, parent, token, ended_with, rank < num_ended
        )  # fmt: skip

        parent, child, score = continuations_in_kernel(live, rank, count, room)
        node = nodes_in_kernel(parent, child, score, states, first_child)
        is_going, num_living = going_on_in_kernel(score, num_living, count)
        slot, num_others = slots_in_kernel(rank, parent, is_going, first_children, dead, num_others)
        put_beams_in_kernel(
            slot, parent, tl.load(node_tokens + node), score, is_going, next_parents, next_tokens, next_scores, words,
            num_ints, width, places, sampled, sampled_stride, num_rows,
        )  # fmt: skip
        tl.store(targets + slot, node.to(tl.int64), mask=is_going)


def warm_up_kernels(serving: KernelVariants) -> None:
    """Take a step."""
    nothing, rules = torch.zeros(2, dtype=torch.int64, device=serving.device), ItemConstraint("")
    along, row = rules.on({"": ConstraintTrie(nothing.int(), nothing.int(), nothing.bool(), [1])}, ()), nothing[:1]
    beams = SearchBeams(torch.zeros(1, 1, device=serving.device), states={along: row[None]})
    for logits in serving.logits:
        of_items = SearchRules(1, BestStrategy(), constraints=(rules,))
        take = KernelWideStepAlongItems(of_items, KernelStepSizes.of(beams, logits.shape[1]))
        take(KernelLogits.of(logits, row), beams, row, row[None].clone())
