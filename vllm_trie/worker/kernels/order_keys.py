"""Order keys in kernels: makes them, selects the first of many, and sorts them.

`search.rank` has them in torch: int64, lower for a better score and, for equal scores, for a lower place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_trie.search.rank import NO_KEY, SCORE_UNIT

KEY_UNIT, LAST_KEY = tl.constexpr(SCORE_UNIT), tl.constexpr(NO_KEY)
NUM_SCORE_BITS = 31
SCORE_BITS, PLACE_BITS = tl.constexpr(NUM_SCORE_BITS), tl.constexpr(SCORE_UNIT.bit_length() - 1)  # of an order key


@triton.jit
def order_key_in_kernel(score, place):
    """As in `search.rank`: lower for a better score and, for equal scores, for a lower place."""
    return tl.abs(score).to(tl.int32, bitcast=True).to(tl.int64) * KEY_UNIT + place


@triton.jit
def key_score_in_kernel(key):
    """The score in an order key, which is at most 0."""
    return 0.0 - (key // KEY_UNIT).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def cutoff_in_kernel(keys, count, num_bits):
    """The `count`-th of distinct order keys; if there are no more, at once a key above all but `LAST_KEY`.

    Bit by bit, so its time does not depend on `count`. `num_bits`: of scores, plus the bits of places that are in use.
    """
    found, has_more = tl.sum(keys * 0, axis=0), tl.sum((keys < LAST_KEY).to(tl.int32), axis=0) > count
    for at in range(tl.where(has_more, num_bits, 0)):
        bit = tl.where(at < SCORE_BITS, SCORE_BITS + PLACE_BITS, num_bits) - 1 - at
        trial = found + (tl.full([], 1, tl.int64) << bit.to(tl.int64))
        num_before = tl.sum((keys < trial).to(tl.int32), axis=0)
        found = tl.where(num_before < count, trial, found)
    return tl.where(has_more, found, LAST_KEY - 1)


@triton.jit
def nth_score_in_kernel(scores, count):
    """The `count`-th best of scores, including repeats, bit by bit; NaN if fewer of them are numbers."""
    bits, found = tl.abs(scores).to(tl.int32, bitcast=True), tl.sum((scores == 0.0).to(tl.int32) * 0, axis=0)
    for at in range(SCORE_BITS):
        trial = found + (tl.full([], 1, tl.int32) << (SCORE_BITS - 1 - at))
        found = tl.where(tl.sum((bits < trial).to(tl.int32), axis=0) < count, trial, found)
    return 0.0 - found.to(tl.float32, bitcast=True)


@triton.jit
def cutoffs_in_kernel(keys, counts, num_bits):
    """`cutoff_in_kernel` of several lists [L, n] at once, counts [L]."""
    found = tl.sum(keys * 0, axis=1)
    for at in range(num_bits):
        bit = tl.where(at < SCORE_BITS, SCORE_BITS + PLACE_BITS, num_bits) - 1 - at
        trial = found + (tl.full([], 1, tl.int64) << bit.to(tl.int64))
        num_before = tl.sum((keys < trial[:, None]).to(tl.int32), axis=1)
        found = tl.where(num_before < counts, trial, found)
    return found


@triton.jit
def keep_keys_in_kernel(values, is_kept, to, num_kept, size: tl.constexpr):
    """Stores the kept values in sequence, after `num_kept` earlier ones, and fills up `size` with `LAST_KEY`."""
    place = num_kept + tl.cumsum(is_kept.to(tl.int32), axis=0) - 1
    rest = tl.arange(0, size)
    tl.store(to + place, values, mask=is_kept)
    num_kept += tl.sum(is_kept.to(tl.int32), axis=0)
    tl.store(to + rest, tl.full([size], LAST_KEY, tl.int64), mask=rest >= num_kept)
    tl.debug_barrier()
    return num_kept


@triton.jit
def is_among_in_kernel(tokens, ids, count):
    """Which tokens are among `count` ids."""
    found = tokens < 0
    for at in range(count):
        found = found | (tokens == tl.load(ids + at))
    return found


@triton.jit
def sort_keys_in_kernel(unordered, rank, to):
    """Keys in order; `to`: scratch space for them, which may be where they come from."""
    other, own = unordered[None, :], unordered[:, None]
    is_before = (other < own) | ((other == own) & (rank[None, :] < rank[:, None]))
    tl.debug_barrier()
    tl.store(to + tl.sum(is_before.to(tl.int32), axis=1), unordered)
    tl.debug_barrier()
    return tl.load(to + rank)


@triton.jit
def first_of_lists_in_kernel(
    keys, from_list_to_list, stride, num_rows, of_first, of_second, num_bits, order, per_row: tl.constexpr, lanes:
    tl.constexpr, part: tl.constexpr, slots: tl.constexpr,
):  # fmt: skip
    """Sorts the first keys of a group in two lists.

    Args:
        keys: The rows of one list; the other's are `from_list_to_list` further.
        stride: From row to row, of whose keys the first `per_row` count.
        of_first, of_second: How many of each list, at most `slots`; `of_second` is 0 if there is no second list.
        order: Room for four times `slots`; the sorted lists are in the second half.
    """
    which, lane, num_of_first = tl.arange(0, 2), tl.arange(0, lanes), num_rows * per_row
    num_of_second = tl.where(of_second > 0, num_of_first, 0)
    of_rows = lane // per_row * stride + lane % per_row
    exists = lane[None, :] < tl.where(which == 0, num_of_first, num_of_second)[:, None]
    of_lists = tl.load(keys + which[:, None] * from_list_to_list + of_rows[None, :], mask=exists, other=LAST_KEY)
    last = cutoffs_in_kernel(of_lists, tl.where(which == 0, of_first, of_second), num_bits)
    for number in tl.static_range(2):
        own_last, num_kept = tl.sum(tl.where(which == number, last, 0), axis=0), 0
        num_own = tl.where(number == 0, num_of_first, num_of_second)
        for start in range(0, lanes, part):
            at = start + tl.arange(0, part)
            own = keys + number * from_list_to_list + at // per_row * stride + at % per_row
            some = tl.load(own, mask=at < num_own, other=LAST_KEY)
            num_kept = keep_keys_in_kernel(
                some, (some < LAST_KEY) & (some <= own_last), order + number * slots, num_kept, slots
            )
        rank = number * slots + tl.arange(0, slots)
        sort_keys_in_kernel(tl.load(order + rank), tl.arange(0, slots), order + (2 + number) * slots)
