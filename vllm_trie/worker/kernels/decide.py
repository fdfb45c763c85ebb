"""Decides a step from order keys: what goes on, in which slots, and what finishes. One program per group.

Keys are in two lists: what goes on, and what may finish. They come from any ranking of rows, over all tokens or along a
catalog. With few beams, a group's program first sorts what its rows have kept. With many, keys are sorted already, and
as many programs as a group has parts of slots have found the first child of each slot. Then the program walks through
slots and continuations once, part after part: the n-th of the other children takes the n-th slot whose beam has no
child. `search.strategies.best` and `search.rank` have it in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_trie.search.beams import STATELESS, NextSearchBeams, SearchBeams
from vllm_trie.search.constraints.constraint import Constraint
from vllm_trie.search.rules import SearchRules
from vllm_trie.search.step_result import PackedSearchStep, SearchResultLayout
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.worker.kernels import SLOTS
from vllm_trie.worker.kernels.closed_nodes import NO_ITEM_ENDS, PART_BITS, kinds_in_kernel, read_states_in_kernel
from vllm_trie.worker.kernels.order_keys import (
    KEY_UNIT,
    LAST_KEY,
    NUM_SCORE_BITS,
    first_of_lists_in_kernel,
    key_score_in_kernel,
)
from vllm_trie.worker.kernels.tiles import KernelRanking
from vllm_trie.worker.launches import cdiv

SLOTS_AT_A_TIME, CHILDREN_AT_A_TIME = 32, 256  # with many beams, that a program compares with each other
PART = 1024  # slots or continuations of many beams, in one iteration of a program
KEYS_AT_A_TIME = 1024  # with few beams, that a program sorts at a time
NUM_WARPS = 8  # with many beams
ROOM = tl.constexpr(6)  # keys of scratch space per slot, for a group of few beams
# Which hypotheses finish; kernels take the index.
SEMANTICS = BestStrategy("hf"), BestStrategy("tridecode"), BestStrategy("vllm")
HF, VLLM = tl.constexpr(SEMANTICS.index(BestStrategy("hf"))), tl.constexpr(SEMANTICS.index(BestStrategy("vllm")))


def kernel_slots_of(width: int) -> int:
    """The number of slots that kernels are compiled for, for steps of `width` beams."""
    return next(slots for slots in SLOTS if slots >= width)


def kernel_slots_up_to(most_beams: int) -> list[int]:
    """All numbers of slots that searches of at most `most_beams` beams need."""
    return [slots for below, slots in zip((0, *SLOTS), SLOTS, strict=False) if below < most_beams]


def kernel_sizes_to_select(slots: int, per_row: int) -> dict[str, int]:
    """The sizes that selecting kernels are compiled for: at most `slots` slots and rows, with `per_row` keys each."""
    lanes = slots * per_row
    return {"per_row": per_row, "lanes": lanes, "at_a_time": min(lanes, KEYS_AT_A_TIME), "slots": slots, "part": slots}


def kernel_sizes_to_select_of_many() -> dict[str, int]:
    """`kernel_sizes_to_select` for groups of more slots, whose keys are sorted."""
    return {"per_row": 0, "lanes": 0, "at_a_time": 0, "slots": 0, "part": PART}


def warps_to_select(lanes: int) -> int:
    """Warps of a program that sorts `lanes` keys."""
    return 4 if lanes <= 1024 else 8 if lanes <= 4096 else 16


class KernelDecision:
    """Decides from keys; everything that depends on no keys is computed ahead.

    Args:
        rules: Of the step.
        num_rows: Rows of each group.
        layout: The layout of the decision.
        ranking: Where keys come from; sorted, if it keeps none of each row.
    """

    def __init__(self, rules: SearchRules, num_rows: int, layout: SearchResultLayout, ranking: KernelRanking) -> None:
        self._layout, self._num_places, kept = layout, ranking.num_places, ranking.kept
        self._num_rows, self._width, self._most = num_rows, rules.width, rules.num_beams or rules.width
        self._slots = slots = kernel_slots_of(rules.width) if kept else 0
        self._of_few = num_rows * kept, kept, slots, slots.bit_length()
        self._sizes = kernel_sizes_to_select(slots, slots) if kept else kernel_sizes_to_select_of_many()
        self._num_warps = warps_to_select(self._sizes["lanes"]) if kept else NUM_WARPS
        if rules.are_sparse:  # the best may finish, whatever goes on
            ending, semantics, is_last = 0 if rules.bars_items else self._most, VLLM.value, False
        else:
            ending = rules.width if rules.stops.ending_token_ids else 0
            semantics, is_last = SEMANTICS.index(rules.strategy), rules.is_last
        num_key_bits = NUM_SCORE_BITS + (num_rows * self._num_places).bit_length()
        self._how = self._num_places, num_rows, rules.width, self._most, ending, semantics, num_key_bits, is_last
        self._of_words = layout.num_words, layout.num_ints, layout.num_finished

    def __call__(
        self,
        keys: torch.Tensor,
        places: torch.Tensor,
        sampled: torch.Tensor,
        nodes: tuple[torch.Tensor | int | None, ...] = (*(None,) * 5, 0, 0),
        along: Constraint | None = None,
    ) -> PackedSearchStep:
        """Decides what finishes, and what goes on in which slot, among ranked continuations.

        Args:
            keys: In two lists: for few beams [2, R, kept], for many [2, G, K].
            places, sampled: See `TakeStep`.
            nodes: Of a catalog: the rows' nodes, first children, tokens, which nodes are items, and what is closed, see
                `kinds_in_kernel`.
            along: The catalog.
        """
        num_groups, device = len(places) // self._num_rows, keys.device
        if self._slots:
            of_keys, room = self._of_few, keys.new_empty(num_groups, ROOM.value * self._slots)
        else:
            count = keys.shape[2]
            of_keys = count, 0, count, count.bit_length()
            room = launch_find_first_children(keys[0], self._num_places, self._width, self._most)
        words = torch.empty(num_groups, self._of_words[0], dtype=torch.int32, device=device)
        parents, tokens = torch.empty(2, num_groups, self._width, dtype=torch.int64, device=device)
        targets = None if along is None else torch.empty_like(parents)
        next_scores = torch.empty(num_groups, self._width, dtype=torch.float32, device=device)
        _select_kernel[num_groups,](
            keys, *of_keys, *self._how, room, *nodes, targets, parents, tokens, next_scores, words, *self._of_words,
            places, sampled, sampled.stride(0), **self._sizes, num_warps=self._num_warps,
        )  # fmt: skip
        states = STATELESS if along is None or targets is None else {along: targets}
        after = SearchBeams(next_scores, states=states)
        return PackedSearchStep(NextSearchBeams(parents, tokens, after), words, self._layout)


def launch_find_first_children(keys: torch.Tensor, num_places: int, width: int, most: int) -> torch.Tensor:
    """Finds the first child of each slot.

    Args:
        keys: [G, K] int64, order keys of what goes on, sorted.
        num_places: Places of each row.
        width: Slots, b.
        most: The most continuations that go on.

    Returns:
        [G, 2, b] int32: by slot, the rank of its first continuation that goes on, K if none does; and scratch space.
    """
    num_groups, count = keys.shape
    first_child = torch.empty(num_groups, 2, width, dtype=torch.int32, device=keys.device)
    _find_first_children_kernel[cdiv(width, SLOTS_AT_A_TIME), num_groups](
        keys, count, num_places, width, most, first_child, slots=SLOTS_AT_A_TIME, part=CHILDREN_AT_A_TIME,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return first_child


@triton.jit
def continuations_in_kernel(keys, rank, count, num_places):
    """Parents, places in their rows, and scores of the continuations at ranks; scores are -inf where there is none."""
    key = tl.load(keys + rank, mask=rank < count, other=LAST_KEY)
    exists = key < LAST_KEY
    place = tl.where(exists, key % KEY_UNIT, 0)
    parent, own = (place // num_places).to(tl.int32), (place % num_places).to(tl.int32)
    score = tl.where(exists, key_score_in_kernel(key), float("-inf"))
    return parent, own, score


@triton.jit
def going_on_in_kernel(score, num_living, most):
    """Which continuations go on after `num_living` earlier ones; and how many live then."""
    lives = (score > float("-inf")).to(tl.int32)
    is_going = (lives == 1) & (num_living + tl.cumsum(lives, axis=0) <= most)
    return is_going, num_living + tl.sum(lives, axis=0)


@triton.jit
def first_children_in_kernel(slot, keys, count, num_places, most, part: tl.constexpr):
    """The rank of the first continuation of each slot that goes on; `count` if none does."""
    first = slot * 0 + count
    start, num_living = 0, 0
    while (start < count) & (num_living < most):
        rank = start + tl.arange(0, part)
        parent, _, score = continuations_in_kernel(keys, rank, count, num_places)
        is_going, num_living = going_on_in_kernel(score, num_living, most)
        is_child = (parent[None, :] == slot[:, None]) & is_going[None, :]
        first = tl.minimum(first, tl.min(tl.where(is_child, rank[None, :], count), axis=1))
        start += part
    return first


@triton.jit(do_not_specialize=["count", "num_places", "width", "most"], do_not_specialize_on_alignment=["keys"])
def _find_first_children_kernel(
    keys, count, num_places, width, most, first_child, slots: tl.constexpr, part: tl.constexpr
):  # fmt: skip
    """See `launch_find_first_children`: programs per part of slots, and group."""
    group, slot = tl.program_id(1).to(tl.int64), tl.program_id(0) * slots + tl.arange(0, slots)
    first = first_children_in_kernel(slot, keys + group * count, count, num_places, most, part)
    tl.store(first_child + group * 2 * width + slot, first, mask=slot < width)


@triton.jit
def in_order_in_kernel(
    keys, from_list_to_list, kept, num_rows, going, ending, num_bits, num_places, order, per_row: tl.constexpr,
    lanes: tl.constexpr, at_a_time: tl.constexpr, slots: tl.constexpr,
):  # fmt: skip
    """Sorts the first keys of both lists of a group, and finds first children; see `first_of_lists_in_kernel`.

    Args:
        order: `ROOM` times `slots`: 2 * `slots` of scratch, then what goes on, what may finish, and first children.
    """
    first_of_lists_in_kernel(
        keys, from_list_to_list, kept, num_rows, going, ending, num_bits, order, per_row, lanes, at_a_time, slots
    )  # fmt: skip
    slot = tl.arange(0, slots)
    first = first_children_in_kernel(slot, order + 2 * slots, slots, num_places, going, slots)
    tl.store(order + 4 * slots + slot, first.to(tl.int64))
    tl.debug_barrier()


@triton.jit
def list_dead_in_kernel(first_child, dead, width, count, part: tl.constexpr):
    """Writes which slots of a group have no child, one after the other."""
    num_dead = 0
    for start in range(0, width, part):
        slot = start + tl.arange(0, part)
        is_dead = (tl.load(first_child + slot, mask=slot < width, other=0) == count).to(tl.int32)
        tl.store(dead + num_dead + tl.cumsum(is_dead, axis=0) - 1, slot, mask=is_dead == 1)
        num_dead += tl.sum(is_dead, axis=0)


@triton.jit
def slots_in_kernel(rank, parent, is_going, first_child, dead, num_others):
    """The slots of continuations that go on; and how many that are not first children go on, these included.

    Args:
        num_others: How many such others went on before these.
    """
    is_first = tl.load(first_child + parent, mask=is_going, other=0) == rank
    is_other = (is_going & (is_first == 0)).to(tl.int32)
    taken = tl.load(dead + num_others + tl.cumsum(is_other, axis=0) - 1, mask=is_other == 1, other=0).to(tl.int32)
    return tl.where(is_other == 1, taken, parent), num_others + tl.sum(is_other, axis=0)


@triton.jit
def num_before_in_kernel(keys, others, count, num_bits):
    """How many of `count` other keys, in order, come before each of some keys."""
    num = tl.zeros(keys.shape, tl.int32)
    for at in range(num_bits):
        further = num + (1 << (num_bits - 1 - at))
        other = tl.load(others + further - 1, mask=further <= count, other=LAST_KEY)
        num = tl.where((further <= count) & (other < keys), further, num)
    return num


@triton.jit
def nodes_in_kernel(parent, child, score, states, first_node, closed):
    """Catalog nodes that continuations lead to, the root where there is none; and the parts of their searches."""
    node, part = read_states_in_kernel(tl.load(states + parent), closed)
    return tl.where(score > float("-inf"), tl.load(first_node + node) + child, 0), part


@triton.jit
def put_beams_in_kernel(
    slot, parent, token, score, mask, first, next_parents, next_tokens, next_scores, words, num_ints, num_beams, places,
    num_placed, sampled, sampled_stride,
):  # fmt: skip
    """Writes beams to slots of a group: as tensors, in the packed step, and as the newest tokens of rows."""
    parent += first
    tl.store(next_parents + slot, parent.to(tl.int64), mask=mask)
    tl.store(next_tokens + slot, token.to(tl.int64), mask=mask)
    tl.store(next_scores + slot, score, mask=mask)
    tl.store(words + slot, parent.to(tl.int32), mask=mask)
    tl.store(words + num_beams + slot, token.to(tl.int32), mask=mask)
    tl.store(words + num_ints + slot, score.to(tl.int32, bitcast=True), mask=mask)
    is_placed = mask & (slot < num_placed)
    row = tl.load(places + slot, mask=is_placed, other=0)
    tl.store(sampled + row * sampled_stride, token.to(tl.int64), mask=is_placed)


@triton.jit
def put_ended_in_kernel(at, parent, token, score, mask, first, ended, num_ended, ended_with):
    """Writes what finishes to its places in the packed step."""
    tl.store(ended + at, parent + first, mask=mask)
    tl.store(ended + num_ended + at, token, mask=mask)
    tl.store(ended_with + at, score.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def decide_in_kernel(
    going, ending, count, num_bits, num_places, num_rows, width, most, may_end, semantics, is_last, first_child, dead,
    states, first_node, node_tokens, is_item, closed, num_closed, closed_bits, targets, first, next_parents,
    next_tokens, next_scores, words, num_ints, num_beams, places, num_placed, sampled, sampled_stride, ended,
    most_ended, num_ended, ended_with, part: tl.constexpr,
):  # fmt: skip
    """Decides for one group, and writes the decision.

    Args:
        going: [count] sorted keys of what goes on.
        ending: [count] sorted keys of what may finish; read if `may_end`.
        num_bits: Of `count`.
        num_places: Places of each row.
        num_rows: Rows of the group; each slot continues its own row, or all the only one.
        width: Slots.
        most: The most continuations that go on.
        first_child: [width], by slot; `count` if there is none.
        dead: [width], scratch space.
        states: [num_rows], nodes of a catalog; None: places are tokens, and all that may finish does.
        first: The group's first slot and row, if a search has several groups.
        words: Where the group's first beam is packed, of `num_beams` of a search; floats follow `num_ints`.
        places: Of rows in the batch, from `first` on; `num_placed` of them.
        ended: Where what finishes is packed, `most_ended` of the group and `num_ended` of a search; its scores go to
            `ended_with`.
    """
    of_beams, of_ended = (next_parents, next_tokens, next_scores), (first, ended, num_ended, ended_with)
    of_words, of_rows = (words, num_ints, num_beams), (places, num_placed, sampled, sampled_stride)
    never = tl.full([part], float("-inf"), tl.float32)
    for start in range(0, width, part):  # a slot without a beam continues itself, or the only row
        slot = start + tl.arange(0, part)
        itself = tl.minimum(slot, num_rows - 1)
        put_beams_in_kernel(slot, itself, slot * 0, never, slot < width, first, *of_beams, *of_words, *of_rows)
        if states is not None:
            tl.store(targets + slot, tl.zeros([part], tl.int64), mask=slot < width)
    list_dead_in_kernel(first_child, dead, width, count, part)
    for start in range(0, most_ended, part):
        at = start + tl.arange(0, part)
        put_ended_in_kernel(at, at * 0, at * 0, never, at < most_ended, *of_ended)
    tl.debug_barrier()

    num_ending, num_living, num_others = 0, 0, 0
    for start in range(0, tl.where(may_end, count, 0), part):
        rank = start + tl.arange(0, part)
        parent, token, score = continuations_in_kernel(ending, rank, count, num_places)
        ends, at = score > float("-inf"), rank
        num_ending += tl.sum(ends.to(tl.int32), axis=0)
        if states is not None:
            node, of_search = nodes_in_kernel(parent, token, score, states, first_node, closed)
            kind = kinds_in_kernel(node, ends, of_search, closed, num_closed, closed_bits)
            token, ends = (
                tl.load(node_tokens + node),
                ends & (tl.load(is_item + node) != 0) & (kind & NO_ITEM_ENDS == 0),
            )
        elif semantics != VLLM:
            key = tl.load(ending + rank, mask=rank < count, other=LAST_KEY)
            num_going = tl.minimum(num_before_in_kernel(key, going, count, num_bits), most)
            ends, at = ends & (tl.where(semantics == HF, rank, 0) + num_going < most), rank + num_going
        put_ended_in_kernel(at, parent, token, score, ends, *of_ended)
    for start in range(0, count, part):
        rank = start + tl.arange(0, part)
        parent, token, score = continuations_in_kernel(going, rank, count, num_places)
        is_going, num_living = going_on_in_kernel(score, num_living, most)
        if states is not None:
            node, of_search = nodes_in_kernel(parent, token, score, states, first_node, closed)
            token = tl.load(node_tokens + node)
        elif is_last:
            key, num_before = tl.load(going + rank, mask=rank < count, other=LAST_KEY), tl.zeros([part], tl.int32)
            if may_end:
                num_before = num_before_in_kernel(key, ending, count, num_bits)
            at = rank + tl.where(semantics == VLLM, num_ending, num_before)
            put_ended_in_kernel(
                at, parent, token, score, is_going & (tl.where(semantics == HF, at, 0) < most), *of_ended
            )  # fmt: skip
        slot, num_others = slots_in_kernel(rank, parent, is_going, first_child, dead, num_others)
        put_beams_in_kernel(slot, parent, token, score, is_going, first, *of_beams, *of_words, *of_rows)
        if states is not None:
            tl.store(targets + slot, node.to(tl.int64) + (of_search << PART_BITS), mask=is_going)


@triton.jit(
    do_not_specialize=[
        *("of_group", "kept", "count", "num_bits", "num_places", "num_rows", "width", "going", "ending", "semantics"),
        *(
            "num_key_bits",
            "is_last",
            "num_closed",
            "closed_bits",
            "num_words",
            "num_ints",
            "num_ended",
            "sampled_stride",
        ),
    ],
    do_not_specialize_on_alignment=["states", "targets", "next_tokens", "places", "sampled"],
)
def _select_kernel(
    keys, of_group, kept, count, num_bits, num_places, num_rows, width, going, ending, semantics, num_key_bits, is_last,
    room, states, first_node, node_tokens, is_item, closed, num_closed, closed_bits, targets, next_parents, next_tokens,
    next_scores, words, num_words, num_ints, num_ended, places, sampled, sampled_stride, per_row: tl.constexpr, lanes:
    tl.constexpr, at_a_time: tl.constexpr, slots: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    """Decides for each group what finishes, and what goes on in which slot: a program per group.

    Args:
        keys: For many beams [2, G, count], sorted; for few [2, G, num_rows, kept].
        of_group: Keys of a list per group.
        room: For many [G, 2, width] int32, with first children; for few [G, `ROOM` * slots] int64.
        going: The most continuations that go on.
        ending: How many that may finish are sorted; 0: nothing may.
        num_key_bits: Bits of order keys that are in use.
    """
    group = tl.program_id(0).to(tl.int64)
    from_list_to_list = tl.num_programs(0) * of_group
    keys += group * of_group
    if slots > 0:
        first_child, dead = room + group * ROOM * slots + 4 * slots, room + group * ROOM * slots + 5 * slots
        in_order_in_kernel(
            keys, from_list_to_list, kept, num_rows, going, ending, num_key_bits, num_places, first_child - 4 * slots,
            per_row, lanes, at_a_time, slots,
        )  # fmt: skip
        of_going, of_ending = first_child - 2 * slots, first_child - slots
    else:
        first_child, dead = room + group * 2 * width, room + group * 2 * width + width
        of_going, of_ending = keys, keys + from_list_to_list
    if states is not None:
        states += group * num_rows
        targets += group * width
    by_slot, words = group * width, words + group * num_words
    decide_in_kernel(
        of_going, of_ending, count, num_bits, num_places, num_rows, width, going, ending > 0, semantics, is_last,
        first_child, dead, states, first_node, node_tokens, is_item, closed, num_closed, closed_bits, targets, 0,
        next_parents + by_slot, next_tokens + by_slot, next_scores + by_slot, words, num_ints, width,
        places + group * num_rows, num_rows, sampled, sampled_stride, words + 2 * width, num_ended, num_ended,
        words + num_ints + width, part,
    )  # fmt: skip
