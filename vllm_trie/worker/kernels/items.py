"""The best continuations along a catalog; `search.strategies.best_continuations` has it in torch.

Rows have few continuations: the children of a node. Kernels read only the logits of these. What goes on, because it has
children itself, and what may finish are two lists, which the same launches rank. For few beams, one program per row
finds the best children, in one launch. For many, or for nodes with many children, the best K tiles of all rows'
children hold the best K, as in `wide_keys`: two launches, and two of `torch.topk`.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_trie.search.constraints.catalog import LEVEL_UNIT
from vllm_trie.search.devices import search_arange
from vllm_trie.search.rank import TILE
from vllm_trie.search.rules import SearchRules
from vllm_trie.worker.kernels import CHILDREN, KernelStepSizes
from vllm_trie.worker.kernels.closed_nodes import IS_CLOSED, NO_WAY_ON, kinds_in_kernel, read_states_in_kernel
from vllm_trie.worker.kernels.order_keys import (
    LAST_KEY,
    PLACE_BITS,
    SCORE_BITS,
    cutoff_in_kernel,
    keep_keys_in_kernel,
    order_key_in_kernel,
)
from vllm_trie.worker.kernels.tiles import (
    ALLOWED,
    BLOCK,
    MOST_PER_ROW,
    NOT_ALLOWED,
    KernelKeys,
    KernelLogits,
    KernelRanking,
    KernelTiles,
    logits_in_kernel,
    logprobs_in_kernel,
    normalise_in_kernel,
    subtracted_in_kernel,
)
from vllm_trie.worker.kernels.wide_keys import (
    KEYS_AT_A_TIME,
    LEAST,
    OF_ROW,
    SCORE,
    WARPS_TO_SPLIT,
    kernel_keys_in_order,
    parts_in_kernel,
    split_kernel_keys,
)
from vllm_trie.worker.launches import cdiv, next_power_of_2

KEPT = tl.constexpr(MOST_PER_ROW)  # keys of a row for which there is room
NUM_BITS = SCORE_BITS + PLACE_BITS  # of an order key
CHILDREN_AT_A_TIME = 256  # with many beams, in one iteration of a program
WARPS_TO_RANK = 4
NO_LEVEL = None, 0, 0  # logits are of all tokens


def kernels_take_items_alone(rules: SearchRules) -> bool:
    """Whether each beam follows a catalog to one item, and nothing else bounds or reports what rows take."""
    items = rules.items
    is_one_item = items is not None and (items.is_plain or items.needs_level_alone)
    return is_one_item and (rules.constraints, rules.num_logprobs) == ((items,), None)


def kernels_renormalise(rules: SearchRules) -> bool:
    """Whether rows are normalised among their children."""
    return rules.items is not None and rules.items.renormalizes


def kernel_level_of(logits: KernelLogits) -> torch.Tensor:
    """[V] int64, the tokens that logits are for, where rows are normalised among their children."""
    return search_arange(logits.values.shape[1], logits.values.device) if logits.level is None else logits.level


def kernel_variants_of_logits(rules: SearchRules, logits: torch.Tensor) -> list[torch.Tensor]:
    """Logits [N, V] and, if kernels may take a level's logits by these rules, logits with such a stride."""
    items = rules.items
    return [logits, *([logits.new_zeros(1, LEVEL_UNIT)] if items is not None and items.needs_level_alone else [])]


def _level_arguments(level: torch.Tensor) -> tuple[torch.Tensor | None, int, int]:
    """What kernels take of a level: it, how many tokens it has, and in how many bits they are counted."""
    return level, len(level), len(level).bit_length()


def rank_items_of_few_by_kernel(sizes: KernelStepSizes, count: int, log_min_p: float) -> KernelRanking:
    """Ranks the best `count` children of each row."""
    children = CHILDREN[bisect_left(CHILDREN, sizes.most_children)]
    among_all = kernel_sizes_to_rank_items(cdiv(sizes.vocab_size, BLOCK), children)
    among_children = kernel_sizes_to_rank_items(1, children)

    def launch(tiles: KernelTiles, scores: torch.Tensor, level: torch.Tensor | None, *nodes: Any) -> KernelKeys:
        of_level, compiled = (NO_LEVEL, among_all) if level is None else (_level_arguments(level), among_children)
        keys = torch.empty(2, scores.numel(), KEPT.value, dtype=torch.int64, device=scores.device)
        normal = torch.empty(scores.numel(), 2, dtype=torch.float32, device=scores.device)
        _rank_items_kernel[scores.numel(),](
            *tiles.of_logits, *tiles[4:], scores, scores.shape[1], count, log_min_p, *nodes, *of_level,
            keys, normal, **compiled, num_warps=warps_to_rank_items(children, excludes=nodes[-1] > 0),
        )  # fmt: skip
        return KernelKeys(keys, normal)

    return KernelRanking(launch, children, KEPT.value)


def warps_to_rank_items(children: int, excludes: bool) -> int:
    """More if closed nodes are looked up among many children, which would spill otherwise."""
    return WARPS_TO_RANK * (2 if excludes and children == CHILDREN[-1] else 1)


def kernel_places_for_items(sizes: KernelStepSizes) -> int:
    """Places for the children of a row's node, where they are ranked by tiles."""
    return cdiv(sizes.most_children, TILE) * TILE


def rank_items_of_many_by_kernels(sizes: KernelStepSizes, count: int, log_min_p: float) -> KernelRanking:
    """Ranks the best `count` children of each group."""
    num_places, among_children = kernel_places_for_items(sizes), kernel_sizes_to_rank_tiles(1)
    among_all = kernel_sizes_to_rank_tiles(cdiv(sizes.vocab_size, BLOCK))

    def launch(tiles: KernelTiles, scores: torch.Tensor, level: torch.Tensor | None, *nodes: Any) -> KernelKeys:
        of_level, compiled = (NO_LEVEL, among_all) if level is None else (_level_arguments(level), among_children)
        nodes_and_level = *nodes, *of_level
        (num_groups, num_rows), num_lists = scores.shape, 2 * len(scores)
        of_rows = torch.empty(scores.numel(), OF_ROW.value, dtype=torch.float32, device=scores.device)
        keys = torch.empty(num_lists, num_rows * num_places // TILE, dtype=torch.int64, device=scores.device)
        _rank_item_tiles_kernel[scores.numel(),](
            *tiles.of_logits, *tiles[4:], scores, num_rows, num_places, log_min_p, *nodes_and_level, keys,
            of_rows, **compiled, num_warps=WARPS_TO_RANK,
        )  # fmt: skip
        chosen, keys = split_kernel_keys(keys, count, TILE)
        _rank_items_of_tiles_kernel[cdiv(keys.shape[1], KEYS_AT_A_TIME), num_lists](
            *tiles.of_logits, chosen, chosen.shape[1], of_rows, num_groups, num_rows, num_places, *nodes_and_level,
            keys, tile=TILE, lanes=KEYS_AT_A_TIME, num_warps=WARPS_TO_SPLIT,
        )  # fmt: skip
        return KernelKeys(kernel_keys_in_order(keys, min(count, keys.shape[1])).view(2, num_groups, -1), of_rows)

    return KernelRanking(launch, num_places)


def kernel_sizes_to_rank_items(num_blocks: int, children: int) -> dict[str, int]:
    """The sizes that `_rank_items_kernel` is compiled for."""
    return {"blocks": next_power_of_2(num_blocks), "children": children}


@triton.jit
def item_keys_in_kernel(node, exists, kind, place, logprob, least, score, first_child):
    """Order keys of children that have a way on, and of all children."""
    logprob = tl.where(logprob < least, float("-inf"), logprob)
    own = tl.where(exists, order_key_in_kernel(logprob + score, place), LAST_KEY)
    begin = tl.load(first_child + node, mask=exists, other=0)
    end = tl.load(first_child + node + 1, mask=exists, other=0)
    return tl.where((begin < end) & (kind & NO_WAY_ON == 0), own, LAST_KEY), own


@triton.jit
def children_in_kernel(node, exists, part, closed, num_closed, closed_bits):
    """Which children of a row's node exist and are not closed, and what else is closed at them."""
    kind = kinds_in_kernel(node, exists, part, closed, num_closed, closed_bits)
    return exists & (kind != IS_CLOSED), kind


@triton.jit
def places_in_kernel(node, exists, node_tokens, level, num_level, level_bits):
    """Where the logits of nodes are in a row: at their tokens, or at the tokens' places in a level [num_level]."""
    place = tl.load(node_tokens + node, mask=exists, other=0)
    if level is not None:
        token, place = place, place * 0
        for bit in range(level_bits):
            further = place + (tl.full([], 1, tl.int32) << (level_bits - 1 - bit))
            last = tl.load(level + further - 1, mask=further <= num_level, other=(1 << 31) - 1)
            place = tl.where(last < token, further, place)
    return place


@triton.jit
def child_logits_in_kernel(values, place, exists, vocab_size, classes, temperature):
    """Logits of a row's children; -inf where there is none, or it may not be taken."""
    own = tl.load(classes + place, mask=exists & (place < vocab_size), other=NOT_ALLOWED).to(tl.int32)
    return tl.where(own != NOT_ALLOWED, logits_in_kernel(values, place, vocab_size, temperature), float("-inf"))


@triton.jit
def sum_in_kernel(logit, highest):
    """The sum of exponentials of logits less `highest`."""
    return tl.sum(tl.exp(logit - tl.where(highest == float("-inf"), 0.0, highest)), axis=0)


@triton.jit(
    do_not_specialize=[
        "vocab_size",
        "num_blocks",
        "num_rows",
        "count",
        "num_closed",
        "closed_bits",
        "num_level",
        "level_bits",
    ],
    do_not_specialize_on_alignment=["index", "scores", "states"],
)
def _rank_items_kernel(
    logits, index, stride, vocab_size, classes, mixed, temperature, maxima, sums, num_blocks, scores, num_rows,
    count, log_min_p, states, first_child, node_tokens, closed, num_closed, closed_bits, level, num_level, level_bits,
    keys, normal, blocks: tl.constexpr, children: tl.constexpr,
):  # fmt: skip
    """The best of a row's children that have children, and the best of all: a program per row."""
    row, child = tl.program_id(0), tl.arange(0, children)
    normal += 2 * row
    values = logits + tl.load(index + row) * stride
    parent, part = read_states_in_kernel(tl.load(states + row), closed)
    node, place = tl.load(first_child + parent) + child, (row % num_rows) * children + child
    exists, kind = children_in_kernel(
        node, node < tl.load(first_child + parent + 1), part, closed, num_closed, closed_bits
    )
    at = places_in_kernel(node, exists, node_tokens, level, num_level, level_bits)
    if level is None:
        score = normalise_in_kernel(maxima, sums, num_blocks, scores, row, normal, blocks)
    else:
        logit = child_logits_in_kernel(values, at, exists, vocab_size, classes, temperature)
        highest = tl.max(logit, axis=0)
        score = subtracted_in_kernel(highest, sum_in_kernel(logit, highest), scores, row, normal)
    logprob = logprobs_in_kernel(values, normal, at, vocab_size, classes, temperature, ALLOWED)
    least = tl.max(tl.where(exists, logprob, float("-inf")), axis=0) + log_min_p
    going, own = item_keys_in_kernel(node, exists, kind, place, logprob, least, score, first_child)
    num_rows_in_all = tl.num_programs(0).to(tl.int64)
    last = cutoff_in_kernel(going, count, NUM_BITS)
    keep_keys_in_kernel(going, (going < LAST_KEY) & (going <= last), keys + row.to(tl.int64) * KEPT, 0, KEPT)
    last, ending = cutoff_in_kernel(own, count, NUM_BITS), keys + (num_rows_in_all + row) * KEPT
    keep_keys_in_kernel(own, (own < LAST_KEY) & (own <= last), ending, 0, KEPT)


def kernel_sizes_to_rank_tiles(num_blocks: int) -> dict[str, int]:
    """The sizes that `_rank_item_tiles_kernel` is compiled for."""
    return {"blocks": next_power_of_2(num_blocks), "tile": TILE, "part": CHILDREN_AT_A_TIME}


@triton.jit(
    do_not_specialize=[
        *("vocab_size", "num_blocks", "num_rows", "num_places", "num_closed", "closed_bits", "num_level", "level_bits"),
    ],
    do_not_specialize_on_alignment=["index", "scores", "states"],
)
def _rank_item_tiles_kernel(
    logits, index, stride, vocab_size, classes, mixed, temperature, maxima, sums, num_blocks, scores, num_rows,
    num_places, log_min_p, states, first_child, node_tokens, closed, num_closed, closed_bits, level, num_level,
    level_bits, keys, of_rows, blocks: tl.constexpr, tile: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    """The best keys of each tile of a row's children: of those that have children themselves, and of all.

    A program per row.

    Args:
        keys: [2, R, num_places / tile].
        of_rows: [R, OF_ROW].
    """
    row, num_rows_in_all, num_tiles = tl.program_id(0).to(tl.int64), tl.num_programs(0), num_places // tile
    of_rows += row * OF_ROW
    values = logits + tl.load(index + row) * stride
    parent, own_part = read_states_in_kernel(tl.load(states + row), closed)
    first, end = tl.load(first_child + parent), tl.load(first_child + parent + 1)
    of_level, of_search = (node_tokens, level, num_level, level_bits), (own_part, closed, num_closed, closed_bits)
    if level is None:
        score = normalise_in_kernel(maxima, sums, num_blocks, scores, row, of_rows, blocks)
    else:
        highest = tl.sum(tl.zeros([part], tl.float32), axis=0) + float("-inf")
        total = tl.sum(tl.zeros([part], tl.float32), axis=0)
        for start in range(0, num_places, part):
            node = first + start + tl.arange(0, part)
            exists, _ = children_in_kernel(node, node < end, *of_search)
            at = places_in_kernel(node, exists, *of_level)
            logit = child_logits_in_kernel(values, at, exists, vocab_size, classes, temperature)
            highest = tl.maximum(highest, tl.max(logit, axis=0))
        for start in range(0, num_places, part):
            node = first + start + tl.arange(0, part)
            exists, _ = children_in_kernel(node, node < end, *of_search)
            at = places_in_kernel(node, exists, *of_level)
            logit = child_logits_in_kernel(values, at, exists, vocab_size, classes, temperature)
            total += sum_in_kernel(logit, highest)
        score = subtracted_in_kernel(highest, total, scores, row, of_rows)
    least = tl.sum(tl.zeros([part], tl.float32), axis=0) + float("-inf")
    if log_min_p > float("-inf"):
        for start in range(0, num_places, part):
            node = first + start + tl.arange(0, part)
            exists, _ = children_in_kernel(node, node < end, *of_search)
            at = places_in_kernel(node, exists, *of_level)
            logprob = logprobs_in_kernel(values, of_rows, at, vocab_size, classes, temperature, ALLOWED)
            least = tl.maximum(least, tl.max(tl.where(exists, logprob, float("-inf")), axis=0))
        least += log_min_p
    tl.store(of_rows + LEAST, least)
    tl.store(of_rows + SCORE, score)
    keys += row * num_tiles
    for start in range(0, num_places, part):
        child = start + tl.arange(0, part)
        exists, kind = children_in_kernel(first + child, (child < num_places) & (first + child < end), *of_search)
        of_logit = places_in_kernel(first + child, exists, *of_level)
        logprob = logprobs_in_kernel(values, of_rows, of_logit, vocab_size, classes, temperature, ALLOWED)
        place, at = (row % num_rows) * num_places + child, start // tile + tl.arange(0, part // tile)
        going, own = item_keys_in_kernel(first + child, exists, kind, place, logprob, least, score, first_child)
        best = tl.min(tl.reshape(going, [part // tile, tile]), axis=1)
        tl.store(keys + at, best, mask=at < num_tiles)
        best = tl.min(tl.reshape(own, [part // tile, tile]), axis=1)
        tl.store(keys + num_rows_in_all * num_tiles + at, best, mask=at < num_tiles)


@triton.jit(
    do_not_specialize=[
        *(
            "vocab_size",
            "num_chosen",
            "num_groups",
            "num_rows",
            "num_places",
            "num_closed",
            "closed_bits",
            "num_level",
            "level_bits",
        ),
    ],
    do_not_specialize_on_alignment=["index", "states"],
)
def _rank_items_of_tiles_kernel(
    logits, index, stride, vocab_size, classes, mixed, temperature, chosen, num_chosen, of_rows, num_groups,
    num_rows, num_places, states, first_child, node_tokens, closed, num_closed, closed_bits, level, num_level,
    level_bits, keys, tile: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Makes order keys of the children in chosen tiles: programs per part of these and list of a group."""
    number = tl.program_id(1).to(tl.int64)
    place_of_best, child, exists, at, has_room = parts_in_kernel(chosen, num_chosen, tile, lanes)
    place = place_of_best // tile * tile + child
    row, child = place // num_places, place % num_places
    of_row = number % num_groups * num_rows + row
    parent, part = read_states_in_kernel(tl.load(states + of_row), closed)
    node = tl.load(first_child + parent) + child
    exists &= node < tl.load(first_child + parent + 1)
    exists, kind = children_in_kernel(node, exists, part, closed, num_closed, closed_bits)
    values, of_rows = logits + tl.load(index + of_row) * stride, of_rows + of_row * OF_ROW
    token = places_in_kernel(node, exists, node_tokens, level, num_level, level_bits)
    logprob = logprobs_in_kernel(values, of_rows, token, vocab_size, classes, temperature, ALLOWED)
    least, score = tl.load(of_rows + LEAST), tl.load(of_rows + SCORE)
    going, own = item_keys_in_kernel(node, exists, kind, place, logprob, least, score, first_child)
    tl.store(keys + number * num_chosen * tile + at, tl.where(number < num_groups, going, own), mask=has_room)
