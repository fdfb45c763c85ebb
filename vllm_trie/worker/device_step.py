"""One step of the search without a word to the host: rank, settle and give slots, all on the device.

The same rules as `search.step.hf_step` after `search.ranking.rank_candidates`, in torch. Shapes depend on nothing
that only the device knows, so the host never waits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.search.step import Candidates, Step

INDEX_BITS = 31  # of a continuation within its group; the rest of a key is its score


class DeviceStep(NamedTuple):
    """What one step of G groups of width b decided, [G, b] each; on the device."""

    parents: torch.Tensor  # by slot, int64
    tokens: torch.Tensor  # by slot, int64
    scores: torch.Tensor  # by slot, float32; -inf where fewer than b continuations exist
    finished_parents: torch.Tensor  # of the best b candidates
    finished_tokens: torch.Tensor
    finished_scores: torch.Tensor
    is_finished: torch.Tensor  # bool: which of these end here

    def packed(self) -> torch.Tensor:
        """All of it as one tensor of int32, [7, G, b], to be copied to the host at once."""
        fields = (field.view(torch.int32) if field.is_floating_point() else field.int() for field in self)
        return torch.stack([*fields])


def unpacked(packed: np.ndarray) -> Step:
    """The step of G groups that `DeviceStep.packed` made one array of."""
    parents, tokens, scores, *finished, is_finished = packed
    candidates = Candidates(finished[0], finished[1], finished[2].view(np.float32))
    return Step(parents, tokens, scores.view(np.float32), candidates, is_finished.astype(bool))


def order_keys(total: torch.Tensor) -> torch.Tensor:
    """One integer per continuation that orders as the search does: score desc, parent asc, token asc.

    Keys are unique, so whoever sorts them breaks no ties of their own.

    Args:
        total: [G, r, V] float32, cumulative log-probability of each continuation.

    Returns:
        [G, r * V] int64, the best the largest.
    """
    bits = total.flatten(1).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers they compare as the floats do
    index = torch.arange(bits.shape[1], device=total.device)
    return (ordered.long() << INDEX_BITS) | ((1 << INDEX_BITS) - 1 - index)


def from_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index within the group, int64, and score, float32, of continuations."""
    index = (1 << INDEX_BITS) - 1 - (keys & ((1 << INDEX_BITS) - 1))
    ordered = (keys >> INDEX_BITS).int()
    return index, (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


def best_keys(total: torch.Tensor, count: int) -> torch.Tensor:
    """The keys of the best `count` continuations of each group, [G, K], best first."""
    keys = order_keys(total)
    return keys.topk(min(count, keys.shape[1]), dim=1).values


def settle_keys(
    keys: torch.Tensor, vocab_size: int, stop_token_ids: torch.Tensor, width: int, is_last: bool
) -> DeviceStep:
    """Split ranked continuations into the next b beams and those that finish, as transformers does.

    Args:
        keys: [G, K], the best continuations in order.
        vocab_size: V.
        stop_token_ids: [S] int64.
        width: Beams per group, b.
        is_last: The length is reached: the best b finish, whatever their token.
    """
    index, scores = from_keys(keys)
    parents, tokens = index // vocab_size, index % vocab_size
    stops = torch.isin(tokens, stop_token_ids)
    missing = max(width - keys.shape[1], 0)
    if missing:  # a tiny vocabulary
        fill = torch.nn.functional.pad
        parents, tokens, stops = fill(parents, (0, missing)), fill(tokens, (0, missing)), fill(stops, (0, missing))
        scores = fill(scores, (0, missing), value=float("-inf"))
    order = stops.int().argsort(dim=1, stable=True)[:, :width]
    is_alive = ~stops.gather(1, order)
    next_parents = parents.gather(1, order)
    slots = _slots(next_parents)
    alive_scores = scores.gather(1, order).masked_fill(~is_alive, float("-inf"))

    def by_slot(values: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(values).scatter_(1, slots, values)

    best = slice(0, width)
    return DeviceStep(
        by_slot(next_parents),
        by_slot(tokens.gather(1, order)),
        by_slot(alive_scores),
        parents[:, best],
        tokens[:, best],
        scores[:, best],
        (stops[:, best] | is_last) & (scores[:, best] > float("-inf")),
    )


def _slots(parents: torch.Tensor) -> torch.Tensor:
    """As `search.step.assign_slots`: a first child keeps its parent's slot, the others take dead slots in order."""
    width = parents.shape[1]
    slot = torch.arange(width, device=parents.device)
    is_sibling = (parents[:, :, None] == parents[:, None, :]) & (slot[None, :] < slot[:, None])
    is_first = ~is_sibling.any(dim=2)
    survives = torch.zeros_like(is_first).scatter_(1, parents, True)
    dead_slots = survives.int().argsort(dim=1, stable=True)
    nth_other = ((~is_first).cumsum(dim=1) - 1).clamp(min=0)
    return torch.where(is_first, parents, dead_slots.gather(1, nth_other))
