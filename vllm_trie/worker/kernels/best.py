"""A step of beam search by the best continuations, in three launches; two more report log-probabilities.

`search.step` and `search.strategies.best` have it in torch, for whatever else rules ask, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.stops import StopConstraints
from vllm_trie.search.filters import NO_PRUNING
from vllm_trie.search.rank import TILE
from vllm_trie.search.rules import SearchRules
from vllm_trie.search.step_result import NextSearchBeams, PackedSearchStep
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.worker.kernels import SLOTS, KernelStepSizes, KernelVariants, TakeStep
from vllm_trie.worker.kernels.order_keys import (
    KEY_UNIT,
    LAST_KEY,
    NUM_SCORE_BITS,
    first_of_lists_in_kernel,
    key_score_in_kernel,
)
from vllm_trie.worker.kernels.report import REPORTED, KernelReport
from vllm_trie.worker.kernels.tiles import (
    BOTH,
    ENDING,
    MOST_PER_ROW,
    MOST_TILES,
    KernelLogits,
    KernelRowRanking,
    Wanted,
    can_filter_in_kernels,
    launch_tile_maxima,
)

KEYS_AT_A_TIME = 1024  # that it puts in order
SEMANTICS = (
    BestStrategy("hf"),
    BestStrategy("tridecode"),
    BestStrategy("vllm"),
)  # what says which hypotheses finish; in kernels by number
HF, VLLM = tl.constexpr(SEMANTICS.index(BestStrategy("hf"))), tl.constexpr(SEMANTICS.index(BestStrategy("vllm")))


def can_take_by_kernels(rules: SearchRules, sizes: KernelStepSizes) -> bool:
    """Whether a step by these rules is taken here; `wide` takes those of more beams."""
    return (
        rules.strategy in SEMANTICS
        and (rules.pruning, rules.constraints) == (NO_PRUNING, ())
        and can_filter_in_kernels(rules.filters)
        and (not rules.stops.strings or rules.stops.are_barred)
        and rules.width <= SLOTS[-1]
        and -1 < (rules.num_logprobs or 0) <= MOST_PER_ROW
        and sizes.vocab_size <= MOST_TILES * TILE
    )


class KernelBestStep(TakeStep):
    """Takes a step by such rules."""

    def __init__(self, rules: SearchRules, sizes: KernelStepSizes) -> None:
        num_rows, vocab_size, _ = sizes
        self._width, self._slots = rules.width, kernel_slots_of(rules.width)
        self._temperature = rules.filters.temperature
        self._rank_rows = KernelRowRanking(_wanted_by_kernels(rules), vocab_size)
        self._layout = layout = rules.layout(num_rows, vocab_size)
        self._report = None if layout.top_shape is None else KernelReport(layout, vocab_size)
        self._num_ints, self._num_words = layout.num_ints, layout.num_words
        counts = rules.num_beams or rules.width, rules.width if self._rank_rows.num_lists > 1 else 0
        num_bits = NUM_SCORE_BITS + (num_rows * vocab_size).bit_length()
        self._of_rows = num_rows, vocab_size, *counts, num_bits
        self._how = rules.width, layout.num_finished, SEMANTICS.index(rules.strategy), rules.is_last
        self._sizes = kernel_sizes_to_select(self._slots, self._slots)
        self._num_warps = warps_to_select(self._sizes["lanes"])

    def __call__(
        self, logits: KernelLogits, beams: SearchBeams, places: torch.Tensor, sampled: torch.Tensor
    ) -> PackedSearchStep:
        """See `TakeStep`."""
        logits = logits._replace(temperature=self._temperature)
        scores, tiles, device = beams.scores.contiguous(), launch_tile_maxima(logits), places.device
        num_groups, num_rows = scores.shape
        ranked = self._rank_rows(logits, tiles, scores, num_rows)
        words = torch.empty(num_groups, self._num_words, dtype=torch.int32, device=device)
        order = torch.empty(num_groups, 4 * self._slots, dtype=torch.int64, device=device)
        parents, tokens = torch.empty(2, num_groups, self._width, dtype=torch.int64, device=device)
        next_scores = torch.empty(num_groups, self._width, dtype=torch.float32, device=device)
        kept = self._rank_rows.kept
        _select_best_kernel[num_groups,](
            ranked.keys, num_groups * num_rows * kept, kept, *self._of_rows, logits.classes, *self._how, order, parents,
            tokens, next_scores, words, self._num_words, self._num_ints, places, sampled, sampled.stride(0),
            **self._sizes, num_warps=self._num_warps,
        )  # fmt: skip
        if self._report is not None:
            self._report(logits, tiles, words)
        return PackedSearchStep(NextSearchBeams(parents, tokens, next_scores), words, self._layout)


def _wanted_by_kernels(rules: SearchRules) -> Wanted:
    """Of each row as many as may go on, and as may finish."""
    slots, lists = kernel_slots_of(rules.width), BOTH if rules.stops.ending_token_ids else BOTH[:1]
    if rules.strategy == BestStrategy("vllm"):
        return Wanted(rules.width, 2 * slots, rules.filters, lists, among_best=2 * rules.width)
    return Wanted(rules.width, slots, rules.filters, lists)


def kernel_slots_of(width: int) -> int:
    """What kernels are compiled for that take steps of so many beams."""
    return next(slots for slots in SLOTS if slots >= width)


def kernel_sizes_to_select(slots: int, per_row: int) -> dict[str, int]:
    """What kernels that select are compiled for: groups of so many slots, and as many rows at most; keys of each."""
    lanes = slots * per_row
    return {"per_row": per_row, "lanes": lanes, "part": min(lanes, KEYS_AT_A_TIME), "slots": slots}


def warps_to_select(lanes: int) -> int:
    """Warps of a program of `_select_best_kernel`."""
    return 4 if lanes <= 1024 else 8 if lanes <= 4096 else 16


@triton.jit
def into_slots_in_kernel(parent, alive, slot, width, count: tl.constexpr):
    """Which of `count` candidates each slot takes, `count` for none, see `search.slots.choose_search_slots`."""
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


@triton.jit
def decide_in_kernel(
    key, ranked, num_rows, vocab_size, classes, width, going, semantics, is_last, slots: tl.constexpr
):  # fmt: skip
    """What is decided by the keys of what may go on and of what ends, in order, which lie in `ranked`, too.

    Returns:
        [2 * slots] parents and tokens of candidates, their scores if they finish, else -inf, and whether they end; and
        by slot [slots] parents, tokens and scores.
    """
    rank, slot, exists = tl.arange(0, 2 * slots), tl.arange(0, slots), key < LAST_KEY
    place = tl.where(exists, key % KEY_UNIT, 0).to(tl.int32)
    parent, token = place // vocab_size, place % vocab_size
    score = tl.where(exists, key_score_in_kernel(key), float("-inf"))
    stop = exists & (tl.load(classes + token) == ENDING)
    lives = (score > float("-inf")) & (stop == 0)
    alive = lives & (tl.cumsum(lives.to(tl.int32), axis=0) <= going)
    num_going = tl.where(semantics == HF, rank + 1, tl.cumsum((stop == 0).to(tl.int32), axis=0) + stop.to(tl.int32))
    ends = tl.where(semantics == VLLM, stop | (alive & is_last), (num_going <= going) & (stop | is_last))

    chosen = into_slots_in_kernel(parent, alive, slot, width, 2 * slots)
    has_beam = chosen < 2 * slots
    own = tl.load(ranked + chosen, mask=has_beam, other=0)
    own_place = (own % KEY_UNIT).to(tl.int32)
    own_parent = tl.where(has_beam, own_place // vocab_size, tl.minimum(slot, num_rows - 1))
    own_token = own_place % vocab_size
    own_score = tl.where(has_beam, key_score_in_kernel(own), float("-inf"))
    ended_with = tl.where(ends, score, float("-inf"))
    return parent, token, ended_with, stop.to(tl.int32), own_parent.to(tl.int64), own_token.to(tl.int64), own_score


@triton.jit
def write_ended_in_kernel(words, num_ints, width, num_ended, at, parent, token, score, mask):
    """Write what finishes to its places among `num_ended`, in a step that is packed."""
    ended = words + 2 * width + at
    tl.store(ended, parent, mask=mask)
    tl.store(ended + num_ended, token, mask=mask)
    tl.store(words + num_ints + width + at, score.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def write_beams_in_kernel(words, num_ints, width, at, parent, token, score, mask):
    """Write beams to their slots, in a step that is packed."""
    tl.store(words + at, parent.to(tl.int32), mask=mask)
    tl.store(words + width + at, token.to(tl.int32), mask=mask)
    tl.store(words + num_ints + at, score.to(tl.int32, bitcast=True), mask=mask)


@triton.jit(
    do_not_specialize=[
        *("from_list_to_list", "kept", "num_rows", "vocab_size", "going", "ending", "num_bits", "width"),
        *("num_ended", "semantics", "is_last", "num_words", "num_ints", "sampled_stride"),
    ],
    do_not_specialize_on_alignment=["places", "next_tokens", "sampled"],
)
def _select_best_kernel(
    keys, from_list_to_list, kept, num_rows, vocab_size, going, ending, num_bits, classes, width, num_ended, semantics,
    is_last, order, next_parents, next_tokens, next_scores, words, num_words, num_ints, places, sampled, sampled_stride,
    per_row: tl.constexpr, lanes: tl.constexpr, part: tl.constexpr, slots: tl.constexpr,
):  # fmt: skip
    """Say of each group what finishes, and what goes on in which slot: a program per group.

    Args:
        keys: [L, R, kept].
        order: [G, 4 * slots], room.
    """
    group = tl.program_id(0).to(tl.int64)
    slot, order = tl.arange(0, slots), order + group * 4 * slots
    keys += group * num_rows * kept
    key = first_of_lists_in_kernel(
        keys, from_list_to_list, kept, num_rows, going, ending, num_bits, order, per_row, lanes, part, slots
    )  # fmt: skip
    parent, token, ended_with, stop, own_parent, own_token, own_score = decide_in_kernel(
        key, order + 2 * slots, num_rows, vocab_size, classes, width, going, semantics, is_last, slots
    )  # fmt: skip

    words += group * num_words
    at = tl.arange(0, 2 * slots)
    if semantics == VLLM:  # what ends comes first
        num_before = tl.cumsum(stop, axis=0) - stop
        at = tl.where(stop == 1, num_before, tl.sum(stop, axis=0) + at - num_before)
    write_ended_in_kernel(words, num_ints, width, num_ended, at, parent, token, ended_with, at < num_ended)

    is_slot, by_slot = slot < width, group * width + slot
    tl.store(next_parents + by_slot, own_parent, mask=is_slot)
    tl.store(next_tokens + by_slot, own_token, mask=is_slot)
    tl.store(next_scores + by_slot, own_score, mask=is_slot)
    write_beams_in_kernel(words, num_ints, width, slot, own_parent, own_token, own_score, is_slot)
    is_placed = is_slot & (slot < num_rows)
    row = tl.load(places + group * num_rows + slot, mask=is_placed, other=0)
    tl.store(sampled + row * sampled_stride, own_token, mask=is_placed)


def warm_up_kernels(serving: KernelVariants) -> None:
    """Take a step for each number of slots, of continuations that are kept and of log-probabilities."""
    for logits in serving.logits:
        nothing = torch.zeros(1, dtype=torch.int64, device=serving.device)
        for rules in _kernel_variants(serving.most_beams):
            own = SearchBeams(torch.zeros(1, 1, device=serving.device))
            if can_take_by_kernels(rules, sizes := KernelStepSizes.of(own, logits.shape[1])):
                KernelBestStep(rules, sizes)(KernelLogits.of(logits, nothing), own, nothing, nothing[None].clone())


def kernel_slots_up_to(most_beams: int) -> list[int]:
    """All that searches of so many beams at most are compiled for."""
    return [slots for below, slots in zip((0, *SLOTS), SLOTS, strict=False) if below < most_beams]


def _kernel_variants(most_beams: int) -> Iterator[SearchRules]:
    """Rules of each number of slots, of which a row's best are kept once or twice as many, and that report."""
    for slots in kernel_slots_up_to(most_beams):
        yield from (
            SearchRules(slots, strategy, StopConstraints((0,))) for strategy in (BestStrategy(), BestStrategy("vllm"))
        )
    for num_logprobs in REPORTED:
        yield SearchRules(SLOTS[0], BestStrategy(), num_logprobs=num_logprobs)
