"""A step of group beam search, in three launches; `search.strategies.in_groups` has it in torch.

All rows are ranked at once, as if no group avoided anything. A penalty only affects tokens of earlier groups, of which
there are fewer than beams: so that many more continuations are kept of each row. One program per search then walks its
groups, one after the other, and ranks what their rows have kept again, less the penalties.
"""

from __future__ import annotations

from typing import cast

import torch
import triton
import triton.language as tl

from vllm_trie.search.beams import NextSearchBeams, SearchBeams
from vllm_trie.search.devices import search_constant
from vllm_trie.search.filters import NO_PRUNING
from vllm_trie.search.rules import SearchRules
from vllm_trie.search.step_result import PackedSearchStep
from vllm_trie.search.strategies.in_groups import DiverseGroupsStrategy
from vllm_trie.worker.kernels import SLOTS, KernelStepSizes, KernelVariants, TakeStep
from vllm_trie.worker.kernels.decide import (
    HF,
    ROOM,
    decide_in_kernel,
    in_order_in_kernel,
    kernel_sizes_to_select,
    kernel_slots_of,
    kernel_slots_up_to,
    warps_to_select,
)
from vllm_trie.worker.kernels.order_keys import (
    KEY_UNIT,
    LAST_KEY,
    NUM_SCORE_BITS,
    is_among_in_kernel,
    key_score_in_kernel,
    order_key_in_kernel,
)
from vllm_trie.worker.kernels.tiles import (
    ALLOWED,
    BOTH,
    KernelLogits,
    KernelRowRanking,
    RowRankingTask,
    can_filter_in_kernels,
    kernels_rank_rows,
    launch_tile_maxima,
    logprobs_in_kernel,
)

KEPT = 16, 64  # continuations of a row, of what goes on and what ends: sizes that kernels are compiled for
NO_TOKEN = tl.constexpr(-1)  # in place of a token that no beam took


def can_take_by_kernels(rules: SearchRules, sizes: KernelStepSizes) -> bool:
    """Whether kernels take a step by these rules; otherwise torch does."""
    return (
        isinstance(rules.strategy, DiverseGroupsStrategy)
        and (rules.pruning, rules.constraints, rules.num_logprobs) == (NO_PRUNING, (), None)
        and can_filter_in_kernels(rules.filters)
        and not rules.stops.may_complete
        and rules.width <= SLOTS[-1]
        and kernels_rank_rows(rules.width, sizes.vocab_size)
    )


class KernelStepInGroups(TakeStep):
    """Takes a step by rules that `can_take_by_kernels` accepts."""

    def __init__(self, rules: SearchRules, sizes: KernelStepSizes) -> None:
        strategy, self._num_beams = cast(DiverseGroupsStrategy, rules.strategy), rules.width
        self._temperature, self._done = rules.filters.temperature, strategy.done
        width, may_end = rules.width // strategy.number, bool(rules.stops.ending_token_ids)
        self._rows_of_group = min(sizes.num_rows, width)
        kept = next(kept for kept in KEPT if kept >= rules.width)
        # As many of each row as its group takes, plus as many as earlier groups may have taken.
        wanted = RowRankingTask(rules.width, kept, rules.filters, BOTH if may_end else BOTH[:1])
        self._rank_rows = KernelRowRanking(wanted, sizes.vocab_size)
        self._layout = layout = rules.layout(sizes.num_rows, sizes.vocab_size)
        self._of_words = layout.num_words, layout.num_ints, layout.num_finished
        num_key_bits = NUM_SCORE_BITS + (self._rows_of_group * sizes.vocab_size).bit_length()
        slots, most = kernel_slots_of(width), min(rules.num_beams or width, width)
        self._how = sizes.num_rows, num_key_bits, slots.bit_length(), strategy.number, width, most, may_end
        padding = NO_TOKEN.value if strategy.padding is None else strategy.padding
        self._penalties = float(strategy.penalty), padding
        self._is_last, self._sizes = rules.is_last, kernel_sizes_to_select(slots, kept)
        self._room = ROOM.value * slots + 2 * self._sizes["lanes"]
        self._num_warps = warps_to_select(self._sizes["lanes"])

    def __call__(
        self, logits: KernelLogits, beams: SearchBeams, places: torch.Tensor, sampled: torch.Tensor
    ) -> PackedSearchStep:
        """See `TakeStep`."""
        tiles = launch_tile_maxima(logits._replace(temperature=self._temperature))
        scores, device, num_searches = beams.scores.contiguous(), places.device, len(beams.scores)
        ranked = self._rank_rows(tiles, scores.view(-1, self._rows_of_group))
        words = torch.empty(num_searches, self._of_words[0], dtype=torch.int32, device=device)
        room = torch.empty(num_searches, self._room, dtype=torch.int64, device=device)
        parents, tokens, taken = torch.empty(3, num_searches, self._num_beams, dtype=torch.int64, device=device)
        next_scores, done = scores.new_empty(num_searches, self._num_beams), search_constant(self._done, device)
        _select_in_groups_kernel[num_searches,](
            *tiles.of_logits, ranked.of_rows, scores, ranked.keys, *self._how, *self._penalties, done, len(done),
            self._is_last, room, parents, tokens, next_scores, taken, words, *self._of_words, places, sampled,
            sampled.stride(0), **self._sizes, num_warps=self._num_warps, enable_fp_fusion=False,
        )  # fmt: skip
        return PackedSearchStep(NextSearchBeams(parents, tokens, SearchBeams(next_scores)), words, self._layout)


@triton.jit
def less_penalties_in_kernel(
    keys, to, num_lists, from_list_to_list, num_keys, logits, index, stride, vocab_size, classes, temperature, normal,
    scores, taken, num_taken, penalty, is_done, lanes: tl.constexpr, at_a_time: tl.constexpr,
):  # fmt: skip
    """Ranks the continuations of a group's rows again, less the penalty for each time that a token is in `taken`."""
    for start in range(0, num_lists * lanes, at_a_time):
        of_part = tl.arange(0, at_a_time)
        lane = start % lanes + of_part
        key = tl.load(keys + tl.where(start < lanes, 0, from_list_to_list) + lane, mask=lane < num_keys, other=LAST_KEY)
        exists = key < LAST_KEY
        place = tl.where(exists, key % KEY_UNIT, 0).to(tl.int32)
        row, token = place // vocab_size, place % vocab_size
        num_times = tl.zeros([at_a_time], tl.int32)
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
        *("vocab_size", "num_rows", "num_key_bits", "num_bits", "num_groups", "width", "most", "may_end", "padding"),
        *("num_done", "is_last", "num_words", "num_ints", "num_ended", "sampled_stride"),
    ],
    do_not_specialize_on_alignment=["index", "scores", "next_tokens", "taken", "places", "sampled"],
)
def _select_in_groups_kernel(
    logits, index, stride, vocab_size, classes, mixed, temperature, normal, scores, keys, num_rows, num_key_bits,
    num_bits, num_groups, width, most, may_end, penalty, padding, done, num_done, is_last, room, next_parents,
    next_tokens, next_scores, taken, words, num_words, num_ints, num_ended, places, sampled, sampled_stride,
    per_row: tl.constexpr, lanes: tl.constexpr, at_a_time: tl.constexpr, slots: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    """See `KernelStepInGroups`: a program per search.

    Args:
        keys: [L, R, per_row] of the rows of all searches, as if nothing was taken; two lists if anything may end.
        most: The most continuations that go on, of each group.
        num_ended: The most that may finish, of all groups of a search.
        room: [searches, `ROOM` * slots + 2 * lanes].
        taken: [searches, b], scratch space for the tokens that beams take.
    """
    search, slot, num_beams = tl.program_id(0).to(tl.int64), tl.arange(0, slots), num_groups * width
    first_row, by_slot, of_group = search * num_rows, search * num_beams, num_ended // num_groups
    order = room + search * (ROOM * slots + 2 * lanes)
    words, taken, penalised = words + search * num_words, taken + by_slot, order + ROOM * slots
    num_lists, from_list_to_list = tl.where(may_end, 2, 1), tl.num_programs(0) * num_rows * per_row
    rows_of_group = tl.minimum(num_rows, width)
    for number in range(num_groups):
        first, at_end = number * width, number * of_group
        row, ended = first_row + tl.where(num_rows > 1, first, 0), words + 2 * num_beams + at_end
        is_done = is_among_in_kernel(number, done, num_done).to(tl.int32)
        less_penalties_in_kernel(
            keys + row * per_row, penalised, num_lists, from_list_to_list, rows_of_group * per_row, logits, index + row,
            stride, vocab_size, classes, temperature, normal + 2 * row, scores + row, taken, first, penalty, is_done,
            lanes, at_a_time,
        )  # fmt: skip
        in_order_in_kernel(
            penalised, lanes, per_row, rows_of_group, most, tl.where(may_end, width, 0), num_key_bits, vocab_size,
            order, per_row, lanes, at_a_time, slots,
        )  # fmt: skip
        decide_in_kernel(
            order + 2 * slots, order + 3 * slots, slots, num_bits, vocab_size, rows_of_group, width, most, may_end, HF,
            is_last, order + 4 * slots, order + 5 * slots, None, None, None, None, None, 0, 0, None, first,
            next_parents + by_slot + first, next_tokens + by_slot + first, next_scores + by_slot + first, words + first,
            num_ints, num_beams, places + first_row + first, num_rows - first, sampled, sampled_stride, ended,
            of_group, num_ended, words + num_ints + num_beams + at_end, part,
        )  # fmt: skip
        tl.debug_barrier()
        own = by_slot + first + slot
        token = tl.load(next_tokens + own, mask=slot < width, other=0)
        has_beam = tl.load(next_scores + own, mask=slot < width, other=0) > float("-inf")
        takes = tl.where(is_done != 0, padding, tl.where(has_beam, token, NO_TOKEN))
        tl.store(taken + first + slot, takes, mask=slot < width)
        tl.debug_barrier()


def warm_up_kernels(serving: KernelVariants) -> None:
    """Takes a step for each number of slots, of searches and of their groups."""
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
