"""Which slot each continuation of many beams takes, once they are in order; `search.slots` has it in torch.

As many programs as a group has parts of slots find the first child of each slot. Then one program per group, which
writes what is decided, walks through slots and continuations once: the n-th of the other children takes the n-th slot
whose beam has none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_trie.worker.kernels.order_keys import KEY_UNIT, LAST_KEY, key_score_in_kernel
from vllm_trie.worker.launches import cdiv

SLOTS_AT_A_TIME, CHILDREN_AT_A_TIME = 32, 256  # that a program compares with each other
PART = 1024  # slots or continuations that the last kernel takes at a time
NUM_WARPS = 8


class Slots(NamedTuple):
    """What the last kernel takes of slots."""

    first_child: torch.Tensor  # [G, b] int32, by slot: rank of the first continuation that goes on; K if there is none
    dead: torch.Tensor  # [G, b] int32, room


def launch_find_first_children(keys: torch.Tensor, per_row: int, width: int, most: int) -> Slots:
    """Find the first child of each slot.

    Args:
        keys: [G, K] int64, order keys, in order.
        per_row: Places of each row.
        width: Slots, b.
        most: Continuations that go on at most.
    """
    num_groups, count = keys.shape
    first_child, dead = torch.empty(2, num_groups, width, dtype=torch.int32, device=keys.device)
    _find_first_children_kernel[cdiv(width, SLOTS_AT_A_TIME), num_groups](
        keys, count, per_row, width, most, first_child, slots=SLOTS_AT_A_TIME, part=CHILDREN_AT_A_TIME,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return Slots(first_child, dead)


@triton.jit
def continuations_in_kernel(keys, rank, count, per_row):
    """Of ranks: parents, places in their rows, and scores, -inf where there is none."""
    key = tl.load(keys + rank, mask=rank < count, other=LAST_KEY)
    exists = key < LAST_KEY
    place = tl.where(exists, key % KEY_UNIT, 0)
    parent, own = (place // per_row).to(tl.int32), (place % per_row).to(tl.int32)
    score = tl.where(exists, key_score_in_kernel(key), float("-inf"))
    return parent, own, score


@triton.jit
def going_on_in_kernel(score, num_living, most):
    """Which continuations go on, `num_living` living ones being before them; and how many live then."""
    lives = (score > float("-inf")).to(tl.int32)
    is_going = (lives == 1) & (num_living + tl.cumsum(lives, axis=0) <= most)
    return is_going, num_living + tl.sum(lives, axis=0)


@triton.jit(do_not_specialize=["count", "per_row", "width", "most"], do_not_specialize_on_alignment=["keys"])
def _find_first_children_kernel(
    keys, count, per_row, width, most, first_child, slots: tl.constexpr, part: tl.constexpr
):  # fmt: skip
    """See `launch_find_first_children`: programs per group and part of its slots."""
    group, slot = tl.program_id(1).to(tl.int64), tl.program_id(0) * slots + tl.arange(0, slots)
    keys += group * count
    first = tl.zeros([slots], tl.int32) + count
    start, num_living = 0, 0
    while (start < count) & (num_living < most):
        rank = start + tl.arange(0, part)
        parent, _, score = continuations_in_kernel(keys, rank, count, per_row)
        is_going, num_living = going_on_in_kernel(score, num_living, most)
        is_child = (parent[None, :] == slot[:, None]) & is_going[None, :]
        first = tl.minimum(first, tl.min(tl.where(is_child, rank[None, :], count), axis=1))
        start += part
    tl.store(first_child + group * width + slot, first, mask=slot < width)


@triton.jit
def list_dead_in_kernel(first_child, dead, width, count, part: tl.constexpr):
    """Write which slots of a group have no child, one after the other; a barrier."""
    num_dead = 0
    for start in range(0, width, part):
        slot = start + tl.arange(0, part)
        is_dead = (tl.load(first_child + slot, mask=slot < width, other=0) == count).to(tl.int32)
        tl.store(dead + num_dead + tl.cumsum(is_dead, axis=0) - 1, slot, mask=is_dead == 1)
        num_dead += tl.sum(is_dead, axis=0)
    tl.debug_barrier()


@triton.jit
def slots_in_kernel(rank, parent, is_going, first_child, dead, num_others):
    """Which slots continuations take that go on; and how many go on, these among them, that are no first children.

    Args:
        num_others: Those before them.
    """
    is_first = tl.load(first_child + parent, mask=is_going, other=0) == rank
    is_other = (is_going & (is_first == 0)).to(tl.int32)
    taken = tl.load(dead + num_others + tl.cumsum(is_other, axis=0) - 1, mask=is_other == 1, other=0)
    return tl.where(is_other == 1, taken, parent), num_others + tl.sum(is_other, axis=0)
