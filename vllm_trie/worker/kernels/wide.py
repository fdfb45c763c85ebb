"""A step of many beams by the best continuations, in six launches and three of `torch.topk`.

`search.step` and `search.strategies.best` have it in torch. `best` takes what it can in fewer launches: it ranks each
row by itself, which pays for few beams.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_trie.search.beams import Beams
from vllm_trie.search.constraints.stops import Stops
from vllm_trie.search.devices import constant
from vllm_trie.search.filters import Pruning
from vllm_trie.search.rank import Candidates
from vllm_trie.search.rules import SelectRules
from vllm_trie.search.step_result import Going
from vllm_trie.search.strategies.best import Best
from vllm_trie.worker.kernels import Serving
from vllm_trie.worker.kernels.best import (
    HF,
    SEMANTICS,
    VLLM,
    Taken,
    layout_of,
    num_ranked,
    write_beams,
    write_ended,
)
from vllm_trie.worker.kernels.report import can_report, report
from vllm_trie.worker.kernels.tiles import BLOCK, RowLogits, can_filter, tiles_of
from vllm_trie.worker.kernels.wide_keys import OwnTokens, best_of_groups, have_keys
from vllm_trie.worker.kernels.wide_slots import (
    NUM_WARPS,
    PART,
    continuations,
    first_children,
    going_on,
    list_dead,
    slots_of,
)

MOST_BLOCKS = 128  # of a row, that kernels are compiled for


def takes(rules: SelectRules, _: Beams, vocab_size: int) -> bool:
    """Whether a step by these rules is taken here; else torch takes it."""
    return (
        rules.strategy in SEMANTICS
        and (rules.pruning, rules.constraints) == (Pruning(), ())
        and can_filter(rules.filters)
        and (not rules.stops.strings or rules.stops.are_barred)
        and (rules.num_logprobs is None or can_report(rules.num_logprobs, vocab_size))
        and vocab_size <= MOST_BLOCKS * BLOCK
        and have_keys(rules.width, vocab_size)
    )


def take_step(
    rules: SelectRules, logits: RowLogits, beams: Beams, places: torch.Tensor, sampled: torch.Tensor
) -> Taken:
    """What `search.step.take_step` does, where `takes` says so; as `best.take_step`."""
    logits = logits._replace(temperature=rules.filters.temperature)
    scores, tiles, vocab_size = beams.scores.contiguous(), tiles_of(logits), logits.values.shape[1]
    own_tokens = OwnTokens(rules.stops.token_ids, 2 * rules.width) if rules.strategy == Best("vllm") else OwnTokens()
    count = min(num_ranked(rules), scores.shape[1] * vocab_size)
    keys, own = best_of_groups(logits, tiles, scores, count, rules.filters, own_tokens)
    taken = select(rules, keys, own, vocab_size, places, sampled)
    if taken.layout.top_shape is not None:
        report(logits, tiles, taken.words, taken.layout)
    return taken


def select(
    rules: SelectRules, keys: torch.Tensor, own: torch.Tensor, vocab_size: int, places: torch.Tensor,
    sampled: torch.Tensor,
) -> Taken:  # fmt: skip
    """Say what finishes, and what goes on in which slot, of what is ranked: keys [G, K] and scores [G * r, S]."""
    (num_groups, count), width, device = keys.shape, rules.width, keys.device
    num_rows, most = len(own) // num_groups, rules.num_beams or width
    layout = layout_of(rules, num_rows, vocab_size)
    num_ended, num_ints = layout.ints[2], sum(layout.ints)
    words = torch.empty(num_groups, num_ints + sum(layout.floats), dtype=torch.int32, device=device)
    parents, tokens = torch.empty(2, num_groups, width, dtype=torch.int64, device=device)
    by_slot = Candidates(parents, tokens, torch.empty(num_groups, width, dtype=torch.float32, device=device))
    stops = constant(rules.stops.token_ids, device)
    slots = first_children(keys, vocab_size, stops, width, most)
    ends = own, own.shape[1], num_ended, SEMANTICS.index(rules.strategy), rules.is_last
    _select_wide[num_groups,](
        keys, num_rows, vocab_size, count, stops, len(stops), width, most, *ends, *slots, *by_slot, words,
        words.shape[1], num_ints, places, sampled, sampled.stride(0), part=PART, num_warps=NUM_WARPS,
    )  # fmt: skip
    return Taken(Going(*by_slot), words, layout)


@triton.jit
def write_own(own, stops, num_own, words, num_ints, width, num_ended, num_rows, part: tl.constexpr):
    """Write what ends each row of a group by itself, in a step that is packed."""
    for start in range(0, num_rows, part):
        row = start + tl.arange(0, part)
        is_row = row < num_rows
        for at in range(num_own):
            stop, of_row = tl.load(stops + at).to(tl.int32), row * num_own + at
            score = tl.load(own + of_row, mask=is_row, other=float("-inf"))
            write_ended(words, num_ints, width, num_ended, of_row, row, stop, score, is_row)


@triton.jit
def put_beams(
    slot, parent, token, score, mask, next_parents, next_tokens, next_scores, words, num_ints, width, places, sampled,
    sampled_stride, num_rows,
):  # fmt: skip
    """Write beams to slots of a group: as tensors, in a step that is packed, and as the newest tokens of rows."""
    tl.store(next_parents + slot, parent.to(tl.int64), mask=mask)
    tl.store(next_tokens + slot, token.to(tl.int64), mask=mask)
    tl.store(next_scores + slot, score, mask=mask)
    write_beams(words, num_ints, width, slot, parent, token, score, mask)
    is_placed = mask & (slot < num_rows)
    row = tl.load(places + slot, mask=is_placed, other=0)
    tl.store(sampled + row * sampled_stride, token.to(tl.int64), mask=is_placed)


@triton.jit
def clear_slots(
    next_parents, next_tokens, next_scores, words, num_ints, width, places, sampled, sampled_stride, num_rows,
    part: tl.constexpr,
):  # fmt: skip
    """Let all slots of a group continue themselves, or the only row, without a beam. Another write needs a barrier."""
    for start in range(0, width, part):
        slot = start + tl.arange(0, part)
        put_beams(
            slot, tl.minimum(slot, num_rows - 1), slot * 0, tl.full([part], float("-inf"), tl.float32), slot < width,
            next_parents, next_tokens, next_scores, words, num_ints, width, places, sampled, sampled_stride, num_rows,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        *("num_rows", "vocab_size", "count", "num_stops", "width", "most", "num_own", "num_ended", "semantics"),
        *("is_last", "num_words", "num_ints", "sampled_stride"),
    ],
    do_not_specialize_on_alignment=["dead", "places", "next_tokens", "sampled"],
)
def _select_wide(
    keys, num_rows, vocab_size, count, stops, num_stops, width, most, own, num_own, num_ended, semantics, is_last,
    first_child, dead, next_parents, next_tokens, next_scores, words, num_words, num_ints, places, sampled,
    sampled_stride, part: tl.constexpr,
):  # fmt: skip
    """See `select`: a program per group."""
    group = tl.program_id(0).to(tl.int64)
    keys, own, words = keys + group * count, own + group * num_rows * num_own, words + group * num_words
    first_child, dead, places = first_child + group * width, dead + group * width, places + group * num_rows
    next_parents += group * width
    next_tokens += group * width
    next_scores += group * width
    write_own(own, stops, num_own, words, num_ints, width, num_ended, num_rows, part)
    clear_slots(
        next_parents, next_tokens, next_scores, words, num_ints, width, places, sampled, sampled_stride, num_rows, part
    )  # fmt: skip
    list_dead(first_child, dead, width, count, part)
    first_ended, num_living, num_others, num_before = num_rows * num_own, 0, 0, 0
    for start in range(0, count, part):
        rank = start + tl.arange(0, part)
        parent, token, score, stop = continuations(keys, rank, count, vocab_size, stops, num_stops)
        is_going, num_living = going_on(score, stop, num_living, most)
        goes = (stop == 0).to(tl.int32)
        num_going = tl.where(semantics == HF, rank + 1, num_before + tl.cumsum(goes, axis=0) + 1 - goes)
        num_before += tl.sum(goes, axis=0)
        ends = tl.where(semantics == VLLM, is_going, (num_going <= most) & (stop | is_last))
        is_ended, at = (rank < count) & (first_ended + rank < num_ended), first_ended + rank
        ended_with = tl.where(ends, score, float("-inf"))
        write_ended(words, num_ints, width, num_ended, at, parent, token, ended_with, is_ended)
        slot, num_others = slots_of(rank, parent, is_going, first_child, dead, num_others)
        put_beams(
            slot, parent, token, score, is_going, next_parents, next_tokens, next_scores, words, num_ints, width,
            places, sampled, sampled_stride, num_rows,
        )  # fmt: skip


def warm_up(serving: Serving) -> None:
    """Take a step."""
    for logits in serving.logits:
        nothing = torch.zeros(1, dtype=torch.int64, device=serving.device)
        own, rules = Beams(torch.zeros(1, 1, device=serving.device)), SelectRules(1, Best(), Stops((0,)))
        if takes(rules, own, logits.shape[1]):
            take_step(rules, RowLogits(logits, nothing), own, nothing, nothing[None].clone())
