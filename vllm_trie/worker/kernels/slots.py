"""Which slot each of the next beams takes, in one launch; `search.rank` has it in torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_trie.search.rank import SearchCandidates
from vllm_trie.search.rank import choose_next_search_beams as select_next_in_torch
from vllm_trie.worker.kernels import KernelVariants
from vllm_trie.worker.launches import next_power_of_2

PAIRS_PER_THREAD = (
    32  # (slot, candidate) pairs that a thread of `_select_next_kernel` compares at a time; more would spill
)
MOST_SLOTS = 1024  # of a program of `_select_next_kernel`; more would spill, and its work grows with their square


def launch_select_next(
    candidates: SearchCandidates[torch.Tensor], lives: torch.Tensor, width: int, num_rows: int
) -> SearchCandidates[torch.Tensor]:
    """`search.rank.choose_next_search_beams` by one program per group; by torch where groups are too wide.

    Args:
        candidates: [G, K], the best first.
        lives: [G, K] bool, which of them may go on.
        width: Beams per group, b.
        num_rows: Rows per group that they continue: 1 or b.
    """
    if width > MOST_SLOTS:
        return select_next_in_torch(candidates, lives, width, num_rows)
    num_groups, count = lives.shape
    slots = next_power_of_2(width)
    chunk, num_warps = kernel_candidates_at_once(slots), warps_to_select_next(slots)
    ranked = *(field.contiguous() for field in candidates), lives.contiguous().view(torch.int8)
    parents, tokens = torch.empty(2, num_groups, width, dtype=torch.int64, device=lives.device)
    beams = SearchCandidates(parents, tokens, torch.empty(num_groups, width, dtype=torch.float32, device=lives.device))
    _select_next_kernel[num_groups,](
        *ranked, count, *beams, width, num_rows, slots=slots, chunk=chunk, num_warps=num_warps
    )
    return beams


def warps_to_select_next(slots: int) -> int:
    """Warps of a program of `_select_next_kernel`."""
    return 4 if slots <= 64 else 8 if slots <= 256 else 16


def kernel_candidates_at_once(slots: int) -> int:
    """Candidates that a program of `_select_next_kernel` compares with all slots at a time."""
    return min(max(PAIRS_PER_THREAD * 32 * warps_to_select_next(slots) // slots, 16), 32)


@triton.jit
def _first_alive_in_kernel(lives, rank, count, num_alive, width):
    """Which candidates at `rank` are among the first `width` live ones."""
    alive = tl.load(lives + rank, mask=rank < count, other=0) != 0
    return alive & (num_alive + tl.cumsum(alive.to(tl.int32), axis=0) <= width)


@triton.jit(do_not_specialize=["count", "width", "num_rows"], do_not_specialize_on_alignment=["next_tokens"])
def _select_next_kernel(
    parents, tokens, scores, lives, count, next_parents, next_tokens, next_scores, width, num_rows, slots: tl.constexpr,
    chunk: tl.constexpr,
):  # fmt: skip
    """See `launch_select_next`: a program per group.

    Args:
        parents: [G, K] int64.
        tokens: [G, K] int64.
        scores: [G, K].
        lives: [G, K] int8.
        next_parents: [G, b] int64.
        next_tokens: [G, b] int64.
        next_scores: [G, b].
    """
    first = tl.program_id(0).to(tl.int64) * count
    parents, tokens, scores, lives = parents + first, tokens + first, scores + first, lives + first
    slot = tl.arange(0, slots)

    # Each slot's first child. The first `width` live candidates usually end soon after the `width`-th.
    chosen = tl.zeros([slots], tl.int32) + count
    start = 0
    num_alive = 0
    while (start < count) & (num_alive < width):
        rank = start + tl.arange(0, chunk)
        alive = _first_alive_in_kernel(lives, rank, count, num_alive, width)
        parent = tl.load(parents + rank, mask=rank < count, other=0).to(tl.int32)
        is_child = (parent[None, :] == slot[:, None]) & alive[None, :]
        chosen = tl.minimum(chosen, tl.min(tl.where(is_child, rank[None, :], count), axis=1))
        num_alive += tl.sum(alive.to(tl.int32), axis=0)
        start += chunk

    # The n-th of the other children takes the n-th dead slot.
    first_child = chosen
    is_dead = (first_child == count) & (slot < width)
    nth_dead = tl.where(is_dead, tl.cumsum(is_dead.to(tl.int32), axis=0), 0)
    start = 0
    num_alive = 0
    num_others = 0
    while (start < count) & (num_alive < width):
        rank = start + tl.arange(0, chunk)
        alive = _first_alive_in_kernel(lives, rank, count, num_alive, width)
        is_first = tl.max((first_child[:, None] == rank[None, :]).to(tl.int32), axis=0)
        others = (alive & (is_first == 0)).to(tl.int32)
        nth_other = tl.where(others == 1, num_others + tl.cumsum(others, axis=0), -1)
        takes = nth_dead[:, None] == nth_other[None, :]
        chosen = tl.minimum(chosen, tl.min(tl.where(takes, rank[None, :], count), axis=1))
        num_alive += tl.sum(alive.to(tl.int32), axis=0)
        num_others += tl.sum(others, axis=0)
        start += chunk

    is_slot, has_beam = slot < width, chosen < count
    chosen, at = tl.minimum(chosen, count - 1), tl.program_id(0) * width + slot
    itself = tl.minimum(slot, num_rows - 1).to(tl.int64)
    tl.store(next_parents + at, tl.where(has_beam, tl.load(parents + chosen), itself), mask=is_slot)
    tl.store(next_tokens + at, tl.load(tokens + chosen), mask=is_slot)
    tl.store(next_scores + at, tl.where(has_beam, tl.load(scores + chosen), float("-inf")), mask=is_slot)


def warm_up_kernels(serving: KernelVariants) -> None:
    """Launches the kernel for each number of slots."""
    nothing = torch.zeros(1, 1, dtype=torch.int64, device=serving.device)
    candidates = SearchCandidates(nothing, nothing, nothing.float())
    for width in serving.widths:
        launch_select_next(candidates, nothing.bool(), width, 1)
