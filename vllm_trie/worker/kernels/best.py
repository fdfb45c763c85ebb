"""A step of beam search by the best continuations, in three launches; two more report log-probabilities.

`search.step` and `search.strategies.best` have it in torch, for whatever else rules ask, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_trie.search.beams import Beams
from vllm_trie.search.constraints.stops import Stops
from vllm_trie.search.devices import constant, filled
from vllm_trie.search.filters import LogitsFilters, Pruning
from vllm_trie.search.rank import TILE, Candidates
from vllm_trie.search.rules import SelectRules
from vllm_trie.search.step_result import Layout, Step
from vllm_trie.search.strategies.best import Best, num_candidates
from vllm_trie.worker.kernels import Serving
from vllm_trie.worker.kernels.tiles import (
    BLOCK,
    KEY_UNIT,
    LAST_KEY,
    MOST_PER_ROW,
    MOST_TILES,
    NUM_SCORE_BITS,
    RowKeys,
    RowLogits,
    cutoff,
    is_among,
    keep,
    logprobs_of,
    rank_rows,
    score_of,
    tiles_of,
)

SLOTS = 4, 16, 32, 64  # that kernels are compiled for; of more a program would spill its group's keys
SIZES = [  # slots, and continuations that are kept of each row: as many, twice or four times as many
    *((slots, factor * slots) for slots in SLOTS for factor in (1, 2, 4) if factor * slots <= MOST_PER_ROW)
]
REPORTED = 8, 32, MOST_PER_ROW  # log-probabilities of each row that kernels are compiled for
KEYS_AT_A_TIME = 1024  # that it puts in order


class Taken(NamedTuple):
    """A step of G groups, and what goes to the host."""

    step: Step[torch.Tensor]  # without the log-probabilities that are reported
    words: torch.Tensor  # [G, n] int32, as `search.step_result.packed` lays it out
    layout: Layout


def takes(rules: SelectRules, _: Beams, vocab_size: int) -> bool:
    """Whether a step by these rules is taken here; else torch takes it.

    So that few variants of the kernels are enough, torch also takes steps with more than three stop tokens, or than one
    where there are more than 32 beams.
    """
    return (
        rules.strategy in (Best("hf"), Best("tridecode"))
        and (rules.filters, rules.pruning, rules.constraints) == (LogitsFilters(), Pruning(), ())
        and (not rules.stops.strings or rules.stops.are_barred)
        and rules.width <= SLOTS[-1]
        and (slots_of(rules.width), kept_of(rules)) in SIZES
        and -1 < (rules.num_logprobs or 0) <= MOST_PER_ROW
        and vocab_size <= MOST_TILES * TILE
    )


def take_step(
    rules: SelectRules, logits: RowLogits, beams: Beams, places: torch.Tensor, sampled: torch.Tensor
) -> Taken:
    """What `search.step.take_step` does, where `takes` says so.

    Args:
        rules: Those of G groups.
        logits: Of all their rows, group after group.
        beams: What these carry.
        places: [G * r] int64, of rows in the batch.
        sampled: [batch, ...] int64, receives the newest token of every row.
    """
    scores, tiles = beams.scores.contiguous(), tiles_of(logits)
    ranked = rank_rows(logits, tiles, scores, _count(rules), kept_of(rules))
    taken = _select(rules, logits, scores.shape, ranked, places, sampled)
    if taken.layout.top_shape is not None:
        nothing, count = filled(tuple(scores.shape), 0.0, scores.device), max(taken.layout.top_shape[1], 1)
        tops = rank_rows(logits, tiles, nothing, count, next(kept for kept in REPORTED if kept >= count))
        _report(logits, tops, taken, scores.shape)
    return taken


def _count(rules: SelectRules) -> int:
    """Candidates that must be ranked."""
    return num_candidates(rules.num_beams or rules.width, len(rules.stops.token_ids), rules.width)


def kept_of(rules: SelectRules) -> int:
    """Continuations that are kept of each row: a power of two, and as many as slots at least."""
    return max(triton.next_power_of_2(_count(rules)), slots_of(rules.width))


def slots_of(width: int) -> int:
    """What kernels are compiled for that take steps of so many beams."""
    return next(slots for slots in SLOTS if slots >= width)


def layout_of(rules: SelectRules, num_rows: int, vocab_size: int) -> Layout:
    """How a step is packed."""
    width, count = rules.width, min(_count(rules), num_rows * vocab_size)
    ints, floats = [width, width, count, count], [width, count]
    if rules.num_logprobs is None:
        return Layout(ints, floats, None, False)
    top_shape = torch.Size([num_rows, min(rules.num_logprobs, vocab_size)])
    return Layout(
        [*ints, width, count, top_shape.numel()], [*floats, width, count, top_shape.numel()], top_shape, False
    )


def _select(
    rules: SelectRules,
    logits: RowLogits,
    shape: torch.Size,
    ranked: RowKeys,
    places: torch.Tensor,
    sampled: torch.Tensor,
) -> Taken:
    """Rank what the rows of each group have ranked, and say what finishes and what goes on in which slot."""
    (num_groups, num_rows), vocab_size, device = shape, logits.values.shape[1], places.device
    layout, width, per_row = layout_of(rules, num_rows, vocab_size), rules.width, ranked.keys.shape[1]
    count, num_ints = layout.ints[2], sum(layout.ints)
    words = torch.empty(num_groups, num_ints + sum(layout.floats), dtype=torch.int32, device=device)
    order = torch.empty(num_groups, 2, per_row, dtype=torch.int64, device=device)
    parents, tokens = torch.empty(2, num_groups, width, dtype=torch.int64, device=device)
    beams = Candidates(parents, tokens, torch.empty(num_groups, width, dtype=torch.float32, device=device))
    stops = constant(rules.stops.token_ids, device)
    going, num_bits = rules.num_beams or width, NUM_SCORE_BITS + (num_rows * vocab_size).bit_length()
    of_groups = ranked.keys, num_rows, vocab_size, count, num_bits, stops, len(stops), width, going
    sizes = sizes_to_select(slots_of(width), per_row)
    _select_best[num_groups,](
        *of_groups, order, *beams, words, words.shape[1], num_ints, places, sampled, sampled.stride(0),
        rules.strategy == Best("hf"), rules.is_last, **sizes, num_warps=warps_to_select(sizes["lanes"]),
    )  # fmt: skip
    ended_by, ended_in = words[:, 2 * width : 2 * (width + count)].unflatten(1, (2, count)).unbind(1)
    ended_with = words[:, num_ints + width : num_ints + width + count].view(torch.float32)
    return Taken(Step(*beams, Candidates(ended_by, ended_in, ended_with)), words, layout)


def sizes_to_select(slots: int, per_row: int) -> dict[str, int]:
    """What `_select_best` is compiled for: groups of so many slots, and as many rows at most; keys of each row."""
    lanes = slots * per_row
    return {"per_row": per_row, "lanes": lanes, "part": min(lanes, KEYS_AT_A_TIME), "slots": slots}


def warps_to_select(lanes: int) -> int:
    """Warps of a program of `_select_best`."""
    return 4 if lanes <= 1024 else 8 if lanes <= 4096 else 16


@triton.jit
def in_order(unordered, rank, to):
    """Keys in their order; `to`: where there is room for them."""
    other, own = unordered[None, :], unordered[:, None]
    is_before = (other < own) | ((other == own) & (rank[None, :] < rank[:, None]))
    tl.store(to + tl.sum(is_before.to(tl.int32), axis=1), unordered)
    tl.debug_barrier()
    return tl.load(to + rank)


@triton.jit
def first_in_order(
    keys, stride, num_rows, count, num_bits, order, per_row: tl.constexpr, lanes: tl.constexpr, part: tl.constexpr
):  # fmt: skip
    """The first `count` of a group's keys, in order; `stride`: from row to row; `order`: room for twice as many."""
    lane, num_lanes, rank = tl.arange(0, lanes), num_rows * per_row, tl.arange(0, per_row)
    of_rows = tl.load(keys + lane // per_row * stride + lane % per_row, mask=lane < num_lanes, other=LAST_KEY)
    last, num_kept = cutoff(of_rows, count, num_bits), 0
    for start in range(0, lanes, part):
        at = start + tl.arange(0, part)
        some = tl.load(keys + at // per_row * stride + at % per_row, mask=at < num_lanes, other=LAST_KEY)
        num_kept = keep(some, (some < LAST_KEY) & (some <= last), order, num_kept, per_row)
    return in_order(tl.load(order + rank), rank, order + per_row)


@triton.jit
def into_slots(parent, alive, slot, width, count: tl.constexpr):
    """Which of `count` candidates each slot takes, `count` where it takes none: see `search.slots.choose`."""
    rank = tl.arange(0, count)
    is_child = (parent[None, :] == slot[:, None]) & alive[None, :]
    first_child = tl.min(tl.where(is_child, rank[None, :], count), axis=1)
    is_first = tl.max((first_child[:, None] == rank[None, :]).to(tl.int32), axis=0)
    is_other = (alive & (is_first == 0)).to(tl.int32)
    is_dead = ((first_child == count) & (slot < width)).to(tl.int32)
    nth_other = tl.where(is_other == 1, tl.cumsum(is_other, axis=0), -1)
    nth_dead = tl.where(is_dead == 1, tl.cumsum(is_dead, axis=0), 0)
    taken = tl.min(tl.where(nth_dead[:, None] == nth_other[None, :], rank[None, :], count), axis=1)
    return tl.minimum(first_child, taken)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "vocab_size",
        "count",
        "num_bits",
        "num_stops",
        "width",
        "going",
        "num_words",
        "num_ints",
        "sampled_stride",
        "is_hf",
        "is_last",
    ],
    do_not_specialize_on_alignment=["places", "next_tokens", "sampled"],
)
def _select_best(
    keys, num_rows, vocab_size, count, num_bits, stops, num_stops, width, going, order, next_parents, next_tokens,
    next_scores, words, num_words, num_ints, places, sampled, sampled_stride, is_hf, is_last, per_row: tl.constexpr,
    lanes: tl.constexpr, part: tl.constexpr, slots: tl.constexpr,
):  # fmt: skip
    """See `_select`: a program per group."""
    group = tl.program_id(0).to(tl.int64)
    rank, slot, order = tl.arange(0, per_row), tl.arange(0, slots), order + group * 2 * per_row
    keys += group * num_rows * per_row
    key = first_in_order(keys, per_row, num_rows, count, num_bits, order, per_row, lanes, part)

    place = tl.where(rank < count, key % KEY_UNIT, 0)
    parent, token = (place // vocab_size).to(tl.int32), (place % vocab_size).to(tl.int32)
    score = tl.where(rank < count, score_of(key), float("-inf"))
    stop = is_among(token, stops, num_stops)
    lives = (score > float("-inf")) & (stop == 0)
    alive = lives & (tl.cumsum(lives.to(tl.int32), axis=0) <= going)
    num_going = tl.where(is_hf, rank + 1, tl.cumsum((stop == 0).to(tl.int32), axis=0) + stop.to(tl.int32))
    ends = (num_going <= going) & (stop | is_last)
    words += group * num_words
    ended, is_ranked = words + 2 * width, rank < count
    tl.store(ended + rank, parent, mask=is_ranked)
    tl.store(ended + count + rank, token, mask=is_ranked)
    ended_with = tl.where(ends, score, float("-inf")).to(tl.int32, bitcast=True)
    tl.store(words + num_ints + width + rank, ended_with, mask=is_ranked)

    is_slot, chosen = slot < width, into_slots(parent, alive, slot, width, per_row)
    has_beam, chosen = chosen < per_row, tl.minimum(chosen, count - 1)
    own = tl.load(order + per_row + chosen)
    own_place = own % KEY_UNIT
    own_parent = tl.where(has_beam, own_place // vocab_size, tl.minimum(slot, num_rows - 1).to(tl.int64))
    own_token = own_place % vocab_size
    own_score = tl.where(has_beam, score_of(own), float("-inf"))
    by_slot = group * width + slot
    tl.store(next_parents + by_slot, own_parent, mask=is_slot)
    tl.store(next_tokens + by_slot, own_token, mask=is_slot)
    tl.store(next_scores + by_slot, own_score, mask=is_slot)
    tl.store(words + slot, own_parent.to(tl.int32), mask=is_slot)
    tl.store(words + width + slot, own_token.to(tl.int32), mask=is_slot)
    tl.store(words + num_ints + slot, own_score.to(tl.int32, bitcast=True), mask=is_slot)
    is_placed = is_slot & (slot < num_rows)
    row = tl.load(places + group * num_rows + slot, mask=is_placed, other=0)
    tl.store(sampled + row * sampled_stride, own_token, mask=is_placed)


def _report(logits: RowLogits, tops: RowKeys, taken: Taken, shape: torch.Size) -> None:
    """Write the log-probabilities that are reported: of each row the best, and of beams and what finishes their own.

    Args:
        logits: Of all rows.
        tops: Their best tokens.
        taken: What was decided.
        shape: G and r.
    """
    (num_groups, num_rows), (words, layout) = shape, taken[1:]
    width, count = layout.floats[:2]
    _write_logprobs[num_groups, width + count + num_rows](
        *logits.arguments, *tops, words, words.shape[1], sum(layout.ints), width, count, num_rows,
        layout.ints[-1] // num_rows, per_row=tops.keys.shape[1], block=BLOCK, num_warps=WARPS_TO_REPORT,
    )  # fmt: skip


WARPS_TO_REPORT = 4


@triton.jit(
    do_not_specialize=["vocab_size", "num_barred", "num_words", "num_ints", "width", "count", "num_rows", "num_tops"],
    do_not_specialize_on_alignment=["index"],
)
def _write_logprobs(
    logits, index, stride, vocab_size, barred, num_barred, keys, normal, words, num_words, num_ints, width, count,
    num_rows, num_tops, per_row: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """See `_report`: a program per group, and continuation or row."""
    group, entry, num_entries = tl.program_id(0).to(tl.int64), tl.program_id(1), width + count
    words += group * num_words
    ints, floats = words + 2 * num_entries, words + num_ints + num_entries
    if entry < num_entries:
        at = words + tl.where(entry < width, entry, entry + width)
        of_parent = group * num_rows + tl.load(at)
        newest = tl.load(at + tl.where(entry < width, width, count)) + tl.arange(0, 1)
        values, of_row = logits + tl.load(index + of_parent) * stride, normal + 2 * of_parent
        own = logprobs_of(values, of_row, newest, vocab_size, barred, num_barred)
        num_as_good = tl.zeros([block], tl.int32)
        for start in range(0, vocab_size, block):
            others = start + tl.arange(0, block)
            logprob = logprobs_of(values, of_row, others, vocab_size, barred, num_barred)
            num_as_good += ((logprob >= own) & (others < vocab_size)).to(tl.int32)
        tl.store(ints + entry, tl.sum(num_as_good, axis=0))
        tl.store(floats + entry + tl.arange(0, 1), own.to(tl.int32, bitcast=True))
    else:
        row, rank = entry - num_entries, tl.arange(0, per_row)
        keys += (group * num_rows + row) * per_row
        key = in_order(tl.load(keys + rank), rank, keys)
        first = num_entries + row * num_tops
        token = (key % KEY_UNIT % vocab_size).to(tl.int32)
        tl.store(ints + first + rank, token, mask=rank < num_tops)
        tl.store(floats + first + rank, score_of(key).to(tl.int32, bitcast=True), mask=rank < num_tops)


def warm_up(serving: Serving) -> None:
    """Take a step for each number of slots, of continuations that are kept and of log-probabilities."""
    for logits in serving.logits:
        nothing = torch.zeros(1, dtype=torch.int64, device=serving.device)
        for rules in _variants(serving.most_beams):
            own = Beams(torch.zeros(1, 1, device=serving.device))
            if takes(rules, own, logits.shape[1]):
                take_step(rules, RowLogits(logits, nothing), own, nothing, nothing[None].clone())


def slots_up_to(most_beams: int) -> list[int]:
    """All that searches of so many beams at most are compiled for."""
    return [slots for below, slots in zip((0, *SLOTS), SLOTS, strict=False) if below < most_beams]


def _variants(most_beams: int) -> Iterator[SelectRules]:
    """Rules that lead to each of `SIZES`, and that report."""
    for slots in slots_up_to(most_beams):
        of_slots = SelectRules(slots, Best())
        yield from (of_slots._replace(num_beams=slots // 2), of_slots, of_slots._replace(stops=Stops((0, 0, 0))))
    for num_logprobs in REPORTED:
        yield SelectRules(SLOTS[0], Best(), num_logprobs=num_logprobs)
