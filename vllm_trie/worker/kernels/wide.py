"""A step of many beams by the best continuations, in six launches and three of `torch.topk`.

`search.step` and `search.strategies.best` have it in torch. `best` takes what it can in fewer launches: it ranks each
row by itself, which pays for few beams.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.stops import StopConstraints
from vllm_trie.search.filters import NO_PRUNING
from vllm_trie.search.rules import SearchRules
from vllm_trie.search.step_result import NextSearchBeams, PackedSearchStep
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.worker.kernels import KernelStepSizes, KernelVariants, TakeStep
from vllm_trie.worker.kernels.best import (
    HF,
    SEMANTICS,
    VLLM,
    write_beams_in_kernel,
    write_ended_in_kernel,
)
from vllm_trie.worker.kernels.order_keys import LAST_KEY
from vllm_trie.worker.kernels.report import KernelReport, can_report_by_kernels
from vllm_trie.worker.kernels.tiles import BLOCK, KernelLogits, can_filter_in_kernels, launch_tile_maxima
from vllm_trie.worker.kernels.wide_keys import AmongBest, kernels_have_keys, launch_best_of_groups
from vllm_trie.worker.kernels.wide_slots import (
    NUM_WARPS,
    PART,
    continuations_in_kernel,
    going_on_in_kernel,
    launch_find_first_children,
    list_dead_in_kernel,
    slots_in_kernel,
)

MOST_BLOCKS = 128  # of a row, that kernels are compiled for
MOST_ENDS = 3  # tokens by which vLLM's semantics end hypotheses: it is counted what is better in each row


def can_take_by_kernels(rules: SearchRules, sizes: KernelStepSizes) -> bool:
    """Whether a step by these rules is taken here; else torch takes it."""
    vocab_size = sizes.vocab_size
    return (
        rules.strategy in SEMANTICS
        and (rules.pruning, rules.constraints) == (NO_PRUNING, ())
        and can_filter_in_kernels(rules.filters)
        and (not rules.stops.strings or rules.stops.are_barred)
        and (rules.strategy != BestStrategy("vllm") or len(rules.stops.ending_token_ids) <= MOST_ENDS)
        and (rules.num_logprobs is None or can_report_by_kernels(rules.num_logprobs, vocab_size))
        and vocab_size <= MOST_BLOCKS * BLOCK
        and kernels_have_keys(rules.width, vocab_size)
    )


class KernelWideStep(TakeStep):
    """Takes a step by such rules."""

    def __init__(self, rules: SearchRules, sizes: KernelStepSizes) -> None:
        num_rows, self._vocab_size, _ = sizes
        self._filters, self._width, self._most = rules.filters, rules.width, rules.num_beams or rules.width
        self._stops = rules.stops if rules.strategy == BestStrategy("vllm") else StopConstraints()
        self._count = min(rules.width, num_rows * self._vocab_size)
        self._layout = layout = rules.layout(num_rows, self._vocab_size)
        self._report = None if layout.top_shape is None else KernelReport(layout, self._vocab_size)
        self._num_ints, self._num_words = layout.num_ints, layout.num_words
        self._num_rows = num_rows
        self._how = self._width, self._most, layout.num_finished, SEMANTICS.index(rules.strategy), rules.is_last

    def __call__(
        self, logits: KernelLogits, beams: SearchBeams, places: torch.Tensor, sampled: torch.Tensor
    ) -> PackedSearchStep:
        """See `TakeStep`."""
        logits = logits._replace(temperature=self._filters.temperature)
        scores, tiles, device = beams.scores.contiguous(), launch_tile_maxima(logits), places.device
        among = AmongBest(self._stops.columns(self._vocab_size, device), 2 * self._width)
        keys = launch_best_of_groups(logits, tiles, scores, self._count, self._filters, among)
        taken = self.select(keys, places, sampled)
        if self._report is not None:
            self._report(logits, tiles, taken.words)
        return taken

    def select(self, keys: torch.Tensor, places: torch.Tensor, sampled: torch.Tensor) -> PackedSearchStep:
        """Say what finishes, and what goes on in which slot, of what is ranked.

        Args:
            keys: [2, G, K], of what goes on and of what ends.
            places, sampled: See `TakeStep`.
        """
        (_, num_groups, count), device = keys.shape, keys.device
        slots = launch_find_first_children(keys[0], self._vocab_size, self._width, self._most)
        words = torch.empty(num_groups, self._num_words, dtype=torch.int32, device=device)
        parents, tokens = torch.empty(2, num_groups, self._width, dtype=torch.int64, device=device)
        next_scores = torch.empty(num_groups, self._width, dtype=torch.float32, device=device)
        _select_wide_kernel[num_groups,](
            keys, self._num_rows, self._vocab_size, count, count.bit_length(), *self._how, *slots, parents, tokens,
            next_scores, words, self._num_words, self._num_ints, places, sampled, sampled.stride(0), part=PART,
            num_warps=NUM_WARPS,
        )  # fmt: skip
        return PackedSearchStep(NextSearchBeams(parents, tokens, next_scores), words, self._layout)


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
def put_beams_in_kernel(
    slot, parent, token, score, mask, next_parents, next_tokens, next_scores, words, num_ints, width, places, sampled,
    sampled_stride, num_rows,
):  # fmt: skip
    """Write beams to slots of a group: as tensors, in a step that is packed, and as the newest tokens of rows."""
    tl.store(next_parents + slot, parent.to(tl.int64), mask=mask)
    tl.store(next_tokens + slot, token.to(tl.int64), mask=mask)
    tl.store(next_scores + slot, score, mask=mask)
    write_beams_in_kernel(words, num_ints, width, slot, parent, token, score, mask)
    is_placed = mask & (slot < num_rows)
    row = tl.load(places + slot, mask=is_placed, other=0)
    tl.store(sampled + row * sampled_stride, token.to(tl.int64), mask=is_placed)


@triton.jit
def clear_slots_in_kernel(
    next_parents, next_tokens, next_scores, words, num_ints, width, places, sampled, sampled_stride, num_rows,
    part: tl.constexpr,
):  # fmt: skip
    """Let all slots of a group continue themselves, or the only row, without a beam. Another write needs a barrier."""
    for start in range(0, width, part):
        slot = start + tl.arange(0, part)
        put_beams_in_kernel(
            slot, tl.minimum(slot, num_rows - 1), slot * 0, tl.full([part], float("-inf"), tl.float32), slot < width,
            next_parents, next_tokens, next_scores, words, num_ints, width, places, sampled, sampled_stride, num_rows,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        *("num_rows", "vocab_size", "count", "num_bits", "width", "most", "num_ended", "semantics", "is_last"),
        *("num_words", "num_ints", "sampled_stride"),
    ],
    do_not_specialize_on_alignment=["dead", "places", "next_tokens", "sampled"],
)
def _select_wide_kernel(
    keys, num_rows, vocab_size, count, num_bits, width, most, num_ended, semantics, is_last, first_child, dead,
    next_parents, next_tokens, next_scores, words, num_words, num_ints, places, sampled, sampled_stride,
    part: tl.constexpr,
):  # fmt: skip
    """See `KernelWideStep.select`: a program per group."""
    group = tl.program_id(0).to(tl.int64)
    going, ending, words = keys + group * count, keys + (tl.num_programs(0) + group) * count, words + group * num_words
    first_child, dead, places = first_child + group * width, dead + group * width, places + group * num_rows
    next_parents += group * width
    next_tokens += group * width
    next_scores += group * width
    clear_slots_in_kernel(
        next_parents, next_tokens, next_scores, words, num_ints, width, places, sampled, sampled_stride, num_rows, part
    )  # fmt: skip
    list_dead_in_kernel(first_child, dead, width, count, part)
    for start in range(0, num_ended, part):
        at = start + tl.arange(0, part)
        never = tl.full([part], float("-inf"), tl.float32)
        write_ended_in_kernel(words, num_ints, width, num_ended, at, at * 0, at * 0, never, at < num_ended)
    tl.debug_barrier()
    num_ending, num_living, num_others = 0, 0, 0
    for start in range(0, count, part):
        rank = start + tl.arange(0, part)
        parent, token, score = continuations_in_kernel(ending, rank, count, vocab_size)
        key = tl.load(ending + rank, mask=rank < count, other=LAST_KEY)
        num_going = tl.minimum(num_before_in_kernel(key, going, count, num_bits), most)
        place = tl.where(semantics == VLLM, 0, tl.where(semantics == HF, rank, 0) + num_going)
        ends = (score > float("-inf")) & (place < most)
        at = tl.where(semantics == VLLM, rank, rank + num_going)
        write_ended_in_kernel(words, num_ints, width, num_ended, at, parent, token, score, ends)
        num_ending += tl.sum((score > float("-inf")).to(tl.int32), axis=0)
    for start in range(0, count, part):
        rank = start + tl.arange(0, part)
        parent, token, score = continuations_in_kernel(going, rank, count, vocab_size)
        is_going, num_living = going_on_in_kernel(score, num_living, most)
        key = tl.load(going + rank, mask=rank < count, other=LAST_KEY)
        num_ended_before = tl.where(semantics == VLLM, num_ending, num_before_in_kernel(key, ending, count, num_bits))
        place = rank + tl.where(semantics == HF, num_ended_before, 0)
        ends = is_going & (place < tl.where(is_last, most, 0))
        write_ended_in_kernel(words, num_ints, width, num_ended, rank + num_ended_before, parent, token, score, ends)
        slot, num_others = slots_in_kernel(rank, parent, is_going, first_child, dead, num_others)
        put_beams_in_kernel(
            slot, parent, token, score, is_going, next_parents, next_tokens, next_scores, words, num_ints, width,
            places, sampled, sampled_stride, num_rows,
        )  # fmt: skip


def warm_up_kernels(serving: KernelVariants) -> None:
    """Take a step."""
    for logits in serving.logits:
        nothing = torch.zeros(1, dtype=torch.int64, device=serving.device)
        own = SearchBeams(torch.zeros(1, 1, device=serving.device))
        rules = SearchRules(1, BestStrategy(), StopConstraints((0,)))
        if can_take_by_kernels(rules, sizes := KernelStepSizes.of(own, logits.shape[1])):
            KernelWideStep(rules, sizes)(KernelLogits.of(logits, nothing), own, nothing, nothing[None].clone())
