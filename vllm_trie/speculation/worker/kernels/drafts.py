"""Ranks the best tokens of each row alone, in two launches: what forests are drafted from.

In torch this is a log-softmax and a top-k.
"""

from __future__ import annotations

import torch

from vllm_trie.search.devices import NEVER, filled_for_search, search_constant
from vllm_trie.search.rank import NO_KEY, SCORE_UNIT
from vllm_trie.worker.kernels import KernelVariants
from vllm_trie.worker.kernels.tiles import (
    MOST_PER_ROW,
    KernelLogits,
    KernelRowRanking,
    RowRankingTask,
    launch_tile_maxima,
)
from vllm_trie.worker.launches import next_power_of_2

LEAST_KEPT = 4  # of a row, so that few variants suffice


def launch_best_drafts(values: torch.Tensor, which: torch.Tensor, count: int, kept: int) -> torch.Tensor:
    """Order keys of the best tokens of R rows, [R, kept] int64, unordered.

    Args:
        values: [N, V] logits.
        which: [R] int64, the rows.
        count: Tokens of each row.
        kept: Room for keys; a power of two, at least `kept_by_draft_kernels(count)`.
    """
    logits = KernelLogits.of(values, which)
    zeros = filled_for_search((len(which), 1), 0.0, values.device)
    return KernelRowRanking(RowRankingTask(count, kept), values.shape[1])(launch_tile_maxima(logits), zeros).keys[0]


def decode_draft_kernel_keys(keys: torch.Tensor, ends: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [R, P] float32 and tokens [R, P] int64 of order keys: the best first, -inf last.

    Tokens that end hypotheses also have -inf.
    """
    keys = keys.sort(dim=1).values
    logprobs, tokens = -(keys // SCORE_UNIT).int().view(torch.float32), keys % SCORE_UNIT
    goes_on = keys != NO_KEY
    if ends:
        goes_on &= ~torch.isin(tokens, search_constant(ends, keys.device))
    return logprobs.where(goes_on, NEVER), tokens


def kept_by_draft_kernels(count: int) -> int:
    """Room for the keys of `count` tokens."""
    return max(next_power_of_2(count), LEAST_KEPT)


def warm_up_draft_kernels(serving: KernelVariants) -> None:
    """Ranks a row for every number of keys."""
    for logits in serving.draft_logits:
        row = torch.zeros(1, dtype=torch.int64, device=serving.device)
        kept = LEAST_KEPT
        while kept <= MOST_PER_ROW:
            launch_best_drafts(logits, row, kept, kept)
            kept *= 2
