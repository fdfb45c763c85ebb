"""Log-probabilities that a step reports, in two launches; `search.step.reported_search_step` has it in torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_trie.search.devices import filled_for_search
from vllm_trie.search.step_result import SearchResultLayout
from vllm_trie.worker.kernels.order_keys import KEY_UNIT, key_score_in_kernel, sort_keys_in_kernel
from vllm_trie.worker.kernels.tiles import (
    ALLOWED,
    BLOCK,
    GOING,
    MOST_PER_ROW,
    NOT_ALLOWED,
    KernelRowRanking,
    KernelTiles,
    RowRankingTask,
    logprobs_in_kernel,
    normalised_in_kernel,
)

REPORTED = 8, 32, MOST_PER_ROW  # log-probabilities of each row: sizes that kernels are compiled for


class KernelReport:
    """Writes the log-probabilities that a step reports: each row's best, and those of beams and of what finishes.

    Args:
        layout: The layout of the decision.
        vocab_size: Tokens of a row, V.
    """

    def __init__(self, layout: SearchResultLayout, vocab_size: int) -> None:
        assert layout.top_shape is not None
        (self._num_rows, num_tops), width, count = layout.top_shape, layout.width, layout.num_finished
        most = max(num_tops, 1)
        self._kept = next(kept for kept in REPORTED if kept >= most)
        self._rank_rows = KernelRowRanking(RowRankingTask(most, self._kept), vocab_size)
        self._num_written = width + count + self._num_rows
        self._sides = layout.num_ints, width, count, self._num_rows, num_tops

    def __call__(self, tiles: KernelTiles, words: torch.Tensor) -> None:
        """Writes the log-probabilities that a step reports into its packed decision.

        Args:
            tiles: Of all rows.
            words: [G, n] int32, the packed decision, see `search.step_result.pack_search_step`.
        """
        num_groups, num_words = words.shape
        nothing = filled_for_search((num_groups, self._num_rows), 0.0, words.device)
        tops = self._rank_rows(tiles, nothing)
        _write_logprobs_kernel[self._num_written, num_groups](
            *tiles.of_logits, tops.keys, tops.of_rows, words, num_words, *self._sides, per_row=self._kept, block=BLOCK,
            num_warps=WARPS_TO_REPORT,
        )  # fmt: skip


WARPS_TO_REPORT = 4


@triton.jit(
    do_not_specialize=["vocab_size", "num_words", "num_ints", "width", "count", "num_rows", "num_tops"],
    do_not_specialize_on_alignment=["index"],
)
def _write_logprobs_kernel(
    logits, index, stride, vocab_size, classes, mixed, temperature, keys, normal, words, num_words, num_ints, width,
    count, num_rows, num_tops, per_row: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """See `KernelReport`: a program per continuation or row, and group."""
    entry, group, num_entries = tl.program_id(0), tl.program_id(1).to(tl.int64), width + count
    words += group * num_words
    ints, floats = words + 2 * num_entries, words + num_ints + num_entries
    if entry < num_entries:
        at = words + tl.where(entry < width, entry, entry + width)
        of_parent = group * num_rows + tl.load(at)
        exists = tl.load(words + num_ints + entry).to(tl.float32, bitcast=True) > float("-inf")
        newest = tl.load(at + tl.where(entry < width, width, count)) + tl.arange(0, 1)
        values, of_row = logits + tl.load(index + of_parent) * stride, normal + 2 * of_parent
        own = logprobs_in_kernel(values, of_row, newest, vocab_size, classes, temperature, ALLOWED)
        num_as_good = tl.zeros([block], tl.int32)
        for start in range(0, tl.where(exists, vocab_size, 0), block):
            others = start + tl.arange(0, block)
            num_mixed = tl.where(tl.load(mixed + start // block) > 0, vocab_size, 0)
            class_of = tl.load(classes + others, mask=others < num_mixed, other=GOING)
            logprob = normalised_in_kernel(values, of_row, others, vocab_size, temperature)
            is_as_good = (class_of != NOT_ALLOWED) & (logprob >= own) & (others < vocab_size)
            num_as_good += is_as_good.to(tl.int32)
        tl.store(ints + entry, tl.sum(num_as_good, axis=0))
        tl.store(floats + entry + tl.arange(0, 1), own.to(tl.int32, bitcast=True))
    else:
        row, rank = entry - num_entries, tl.arange(0, per_row)
        keys += (group * num_rows + row) * per_row
        key = sort_keys_in_kernel(tl.load(keys + rank), rank, keys)
        first = num_entries + row * num_tops
        token = (key % KEY_UNIT % vocab_size).to(tl.int32)
        tl.store(ints + first + rank, token, mask=rank < num_tops)
        tl.store(floats + first + rank, key_score_in_kernel(key).to(tl.int32, bitcast=True), mask=rank < num_tops)
