"""A step of group beam search, in three launches; `search.strategies.in_groups` has it in torch.

All rows are ranked at once, as if no group avoided anything. A penalty takes off the tokens of earlier groups alone, of
which there are fewer than beams: so of each row that many more continuations are kept. One program per search then
walks its groups, one after the other, and ranks what their rows have kept anew, less the penalties.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import triton
import triton.language as tl

from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.devices import search_constant
from vllm_trie.search.filters import NO_PRUNING
from vllm_trie.search.rank import TILE
from vllm_trie.search.rules import SearchRules
from vllm_trie.search.step_result import NextSearchBeams, PackedSearchStep
from vllm_trie.search.strategies.in_groups import DiverseGroupsStrategy
from vllm_trie.worker.kernels import SLOTS, KernelStepSizes, KernelVariants, TakeStep
from vllm_trie.worker.kernels.best import (
    HF,
    decide_in_kernel,
    kernel_sizes_to_select,
    kernel_slots_of,
    kernel_slots_up_to,
    warps_to_select,
    write_beams_in_kernel,
    write_ended_in_kernel,
)
from vllm_trie.worker.kernels.order_keys import (
    KEY_UNIT,
    LAST_KEY,
    NUM_SCORE_BITS,
    first_of_lists_in_kernel,
    is_among_in_kernel,
    key_score_in_kernel,
    order_key_in_kernel,
)
from vllm_trie.worker.kernels.tiles import (
    ALLOWED,
    BOTH,
    MOST_TILES,
    KernelLogits,
    KernelRowRanking,
    Wanted,
    can_filter_in_kernels,
    launch_tile_maxima,
    logprobs_in_kernel,
)

KEPT = 16, 64  # continuations of a row, of what goes on and what ends, that kernels are compiled for
NO_TOKEN = tl.constexpr(-1)  # in the place of a token that no beam took


class Groups(NamedTuple):
    """The groups of beams of each search."""

    number: int
    width: int  # beams of each


def can_take_by_kernels(rules: SearchRules, sizes: KernelStepSizes) -> bool:
    """Whether a step by these rules is taken here; else torch takes it."""
    return (
        isinstance(rules.strategy, DiverseGroupsStrategy)
        and (rules.pruning, rules.constraints, rules.num_logprobs) == (NO_PRUNING, (), None)
        and can_filter_in_kernels(rules.filters)
        and (not rules.stops.strings or rules.stops.are_barred)
        and rules.width <= SLOTS[-1]
        and sizes.vocab_size <= MOST_TILES * TILE
    )


def kernel_groups_of(rules: SearchRules) -> Groups:
    """What rules say of groups of beams."""
    number = cast(DiverseGroupsStrategy, rules.strategy).number
    return Groups(number, rules.width // number)


class KernelStepInGroups(TakeStep):
    """Takes a step by such rules."""

    def __init__(self, rules: SearchRules, sizes: KernelStepSizes) -> None:
        strategy, (number, width) = cast(DiverseGroupsStrategy, rules.strategy), kernel_groups_of(rules)
        self._num_beams, self._temperature, self._done = rules.width, rules.filters.temperature, strategy.done
        self._rows_of_group, ending = min(sizes.num_rows, width), width if rules.stops.ending_token_ids else 0
        kept = next(kept for kept in KEPT if kept >= rules.width)
        # As many of each row as its group takes, and as earlier groups may have taken.
        wanted = Wanted(rules.width, kept, rules.filters, BOTH if ending else BOTH[:1])
        self._rank_rows = KernelRowRanking(wanted, sizes.vocab_size)
        self._layout = layout = rules.layout(sizes.num_rows, sizes.vocab_size)
        self._num_ints, self._num_words = layout.num_ints, layout.num_words
        num_bits = NUM_SCORE_BITS + (self._rows_of_group * sizes.vocab_size).bit_length()
        padding = NO_TOKEN.value if strategy.padding is None else strategy.padding
        of_groups = number, width, layout.num_finished // number
        self._of_rows = sizes.num_rows, ending, num_bits, *of_groups, float(strategy.penalty), padding
        self._is_last, self._sizes = rules.is_last, kernel_sizes_to_select(kernel_slots_of(width), kept)
        self._room = 4 * self._sizes["slots"] + 2 * self._sizes["lanes"]
        self._num_warps = warps_to_select(self._sizes["lanes"])

    def __call__(
        self, logits: KernelLogits, beams: SearchBeams, places: torch.Tensor, sampled: torch.Tensor
    ) -> PackedSearchStep:
        """See `TakeStep`."""
        logits = logits._replace(temperature=self._temperature)
        scores, device, num_searches = beams.scores.contiguous(), places.device, len(beams.scores)
        ranked = self._rank_rows(logits, launch_tile_maxima(logits), scores, self._rows_of_group)
        words = torch.empty(num_searches, self._num_words, dtype=torch.int32, device=device)
        order = torch.empty(num_searches, self._room, dtype=torch.int64, device=device)
        parents, tokens, taken = torch.empty(3, num_searches, self._num_beams, dtype=torch.int64, device=device)
        next_scores, done = scores.new_empty(num_searches, self._num_beams), search_constant(self._done, device)
        _select_in_groups_kernel[num_searches,](
            *logits.arguments, ranked.normal, scores, ranked.keys, *self._of_rows, done, len(done), self._is_last,
            order, parents, tokens, next_scores, taken, words, self._num_words, self._num_ints, places, sampled,
            sampled.stride(0), **self._sizes, num_warps=self._num_warps, enable_fp_fusion=False,
        )  # fmt: skip
        return PackedSearchStep(NextSearchBeams(parents, tokens, next_scores), words, self._layout)


@triton.jit
def less_penalties_in_kernel(
    keys, to, num_lists, from_list_to_list, num_keys, logits, index, stride, vocab_size, classes, temperature, normal,
    scores, taken, num_taken, penalty, is_done, lanes: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    """Rank the continuations of a group's rows anew, less what each time costs that its token is among `taken`."""
    for start in range(0, num_lists * lanes, part):
        of_part = tl.arange(0, part)
        lane = start % lanes + of_part
        key = tl.load(keys + tl.where(start < lanes, 0, from_list_to_list) + lane, mask=lane < num_keys, other=LAST_KEY)
        exists = key < LAST_KEY
        place = tl.where(exists, key % KEY_UNIT, 0).to(tl.int32)
        row, token = place // vocab_size, place % vocab_size
        num_times = tl.zeros([part], tl.int32)
        for at in range(num_taken):
            num_times += (token == tl.load(taken + at)).to(tl.int32)
        values = logits + tl.load(index + row) * stride
        logprob = logprobs_in_kernel(values, normal + 2 * row, token, vocab_size, classes, temperature, ALLOWED)
        score = (logprob - penalty * num_times.to(tl.float32)) + tl.load(scores + row)
        score = tl.where((key_score_in_kernel(key) > float("-inf")) & (is_done == 0), score, float("-inf"))
        tl.store(to + start + of_part, tl.where(exists, order_key_in_kernel(score, place), LAST_KEY))
    tl.debug_barrier()


@triton.jit(
    do_not_specialize=[
        *("vocab_size", "num_rows", "ending", "num_bits", "num_groups", "width", "count", "padding", "num_done"),
        *("is_last", "num_words", "num_ints", "sampled_stride"),
    ],
    do_not_specialize_on_alignment=["index", "scores", "next_tokens", "taken", "places", "sampled"],
)
def _select_in_groups_kernel(
    logits, index, stride, vocab_size, classes, mixed, temperature, normal, scores, keys, num_rows, ending, num_bits,
    num_groups, width, count, penalty, padding, done, num_done, is_last, order, next_parents, next_tokens, next_scores,
    taken, words, num_words, num_ints, places, sampled, sampled_stride, per_row: tl.constexpr, lanes: tl.constexpr,
    part: tl.constexpr, slots: tl.constexpr,
):  # fmt: skip
    """See `KernelStepInGroups`: a program per search.

    Args:
        keys: [L, R, per_row] of the rows of all searches, as if nothing was taken.
        ending: What each group ranks of what ends; if any, there are two lists.
        count: Of each group, what may finish at most.
        order: [searches, 4 * slots + 2 * lanes], room.
        taken: [searches, b], room for the tokens that beams take.
    """
    search, rank, slot = tl.program_id(0).to(tl.int64), tl.arange(0, 2 * slots), tl.arange(0, slots)
    num_beams, first_row = num_groups * width, search * num_rows
    num_ended = num_groups * count
    order, words, taken = (
        order + search * (4 * slots + 2 * lanes),
        words + search * num_words,
        taken + search * num_beams,
    )
    num_lists, from_list_to_list = tl.where(ending > 0, 2, 1), tl.num_programs(0) * num_rows * per_row
    penalised = order + 4 * slots
    rows_of_group = tl.minimum(num_rows, width)
    for number in range(num_groups):
        first = number * width
        row = first_row + tl.where(num_rows > 1, first, 0)
        is_done = is_among_in_kernel(number, done, num_done).to(tl.int32)
        less_penalties_in_kernel(
            keys + row * per_row, penalised, num_lists, from_list_to_list, rows_of_group * per_row, logits, index + row,
            stride, vocab_size, classes, temperature, normal + 2 * row, scores + row, taken, first, penalty, is_done,
            lanes, part,
        )  # fmt: skip
        key = first_of_lists_in_kernel(
            penalised, lanes, per_row, rows_of_group, width, ending, num_bits, order, per_row, lanes, part, slots
        )  # fmt: skip
        parent, token, ended_with, _, own_parent, own_token, own_score = decide_in_kernel(
            key, order + 2 * slots, rows_of_group, vocab_size, classes, width, width, HF, is_last, slots
        )  # fmt: skip
        at, is_ranked, is_slot = number * count + rank, rank < count, slot < width
        write_ended_in_kernel(words, num_ints, num_beams, num_ended, at, parent + first, token, ended_with, is_ranked)
        own, own_parent = first + slot, own_parent + first
        by_slot = search * num_beams + own
        tl.store(next_parents + by_slot, own_parent, mask=is_slot)
        tl.store(next_tokens + by_slot, own_token, mask=is_slot)
        tl.store(next_scores + by_slot, own_score, mask=is_slot)
        write_beams_in_kernel(words, num_ints, num_beams, own, own_parent, own_token, own_score, is_slot)
        takes = tl.where(own_score > float("-inf"), own_token, NO_TOKEN)
        tl.store(taken + own, tl.where(is_done != 0, padding, takes), mask=is_slot)
        is_placed = is_slot & (own < num_rows)
        in_batch = tl.load(places + first_row + own, mask=is_placed, other=0)
        tl.store(sampled + in_batch * sampled_stride, own_token, mask=is_placed)
        tl.debug_barrier()


def warm_up_kernels(serving: KernelVariants) -> None:
    """Take a step for each number of slots, of searches and of their groups."""
    nothing = torch.zeros(1, dtype=torch.int64, device=serving.device)
    own = SearchBeams(torch.zeros(1, 1, device=serving.device))
    for logits in serving.logits:
        for slots in kernel_slots_up_to(serving.most_beams):
            for width in (SLOTS[0] // 2, *(slots // 2 for slots in SLOTS[1:])):
                rules = SearchRules(slots, DiverseGroupsStrategy(slots // width, 1.0, None)) if width < slots else None
                if rules is not None and can_take_by_kernels(rules, sizes := KernelStepSizes.of(own, logits.shape[1])):
                    KernelStepInGroups(rules, sizes)(
                        KernelLogits.of(logits, nothing), own, nothing, nothing[None].clone()
                    )
