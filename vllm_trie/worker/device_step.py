"""One step of the search without a word to the host: rank, settle and give slots, all on the device.

The same rules as `search.step.hf_step` after `search.ranking.rank_candidates`. Shapes depend on nothing that only
the device knows, so the host never waits. On a GPU kernels do it, elsewhere torch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.messages import SelectRules
from vllm_trie.search.step import Candidates, Step, num_candidates
from vllm_trie.search.warping import Warping, filtered
from vllm_trie.worker import kernels

INDEX_BITS = 31  # of a continuation within its group; the rest of a key is its score
NEVER = float("-inf")


class DeviceStep(NamedTuple):
    """What one step of G groups of width b decided; on the device."""

    packed: torch.Tensor  # [7, G, b] int32: the fields of `unpacked`, to be copied to the host at once

    @property
    def parents(self) -> torch.Tensor:
        """[G, b] int32, by slot; a slot without a beam continues itself, or the only row there was."""
        return self.packed[0]

    @property
    def tokens(self) -> torch.Tensor:
        """[G, b] int32, by slot; 0 in a slot without a beam."""
        return self.packed[1]

    @property
    def scores(self) -> torch.Tensor:
        """[G, b] float32, by slot; -inf in a slot without a beam."""
        return self.packed[2].view(torch.float32)


def unpacked(packed: np.ndarray) -> Step:
    """The step of G groups that `DeviceStep.packed` holds; of the best b candidates it says which finish."""
    parents, tokens, scores, *finished, is_finished = packed
    candidates = Candidates(finished[0], finished[1], finished[2].view(np.float32))
    return Step(parents, tokens, scores.view(np.float32), candidates, is_finished.astype(bool))


def take_step(
    rules: SelectRules, logits: torch.Tensor, places: torch.Tensor, scores: torch.Tensor, stop_token_ids: torch.Tensor
) -> DeviceStep:
    """One step of G groups with equal rules.

    Args:
        rules: Theirs.
        logits: [R, V] of all rows of the batch.
        places: [G, r] int64, which rows of it are the groups'.
        scores: [G, r] float32, their cumulative log-probabilities.
        stop_token_ids: [S] int64, the rules', on the device.
    """
    by_kernels, vocab_size = kernels.run_on(logits.device), logits.shape[1]
    masked, warping = stop_token_ids if rules.masks_stops else stop_token_ids[:0], rules.warping
    if by_kernels and not warping.filters:
        keys = kernels.continuation_keys(logits, places, scores, warping.temperature, masked)
    else:
        keys = continuation_keys(logits, places, scores, warping, masked)
    count = num_candidates(rules.width, len(stop_token_ids))
    ranked = keys.topk(min(count, keys.shape[1]), dim=1).values
    settled = kernels.settle if by_kernels else settle
    return DeviceStep(settled(ranked, places.shape[1], vocab_size, stop_token_ids, rules.width, rules.is_last))


def continuation_keys(
    logits: torch.Tensor, places: torch.Tensor, scores: torch.Tensor, warping: Warping, masked_token_ids: torch.Tensor
) -> torch.Tensor:
    """One integer per continuation that orders as the search does: score desc, parent asc, token asc.

    A row that may take no token at all has none that lives.

    Args:
        logits: [R, V] of all rows of the batch.
        places: [G, r] int64, which rows of it are the groups'.
        scores: [G, r] float32.
        warping: Temperature and filters.
        masked_token_ids: [S] int64, tokens that may not be taken; what others may is not renormalised.

    Returns:
        [G, r * V] int64, the best the largest.
    """
    logits = logits[places].float()
    is_barred = logits.amax(dim=-1, keepdim=True) == NEVER
    if warping.temperature != 1.0:
        logits = logits / warping.temperature
    logprobs = torch.log_softmax(logits.masked_fill(is_barred, 0.0), dim=-1).masked_fill(is_barred, NEVER)
    logprobs.index_fill_(-1, masked_token_ids, NEVER)
    return order_keys(filtered(logprobs, warping) + scores[..., None])


def order_keys(total: torch.Tensor) -> torch.Tensor:
    """The keys of continuations with cumulative log-probabilities `total`, [G, r, V] float32.

    Keys are unique, so whoever sorts them breaks no ties of their own.
    """
    bits = (total + 0.0).flatten(1).view(torch.int32)  # -0.0 becomes 0.0, which is as good
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers they compare as the floats do
    index = torch.arange(bits.shape[1], device=total.device)
    return (ordered.long() << INDEX_BITS) | ((1 << INDEX_BITS) - 1 - index)


def from_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index within the group, int64, and score, float32, of continuations."""
    index = (1 << INDEX_BITS) - 1 - (keys & ((1 << INDEX_BITS) - 1))
    ordered = (keys >> INDEX_BITS).int()
    return index, (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


def settle(
    keys: torch.Tensor, num_rows: int, vocab_size: int, stop_token_ids: torch.Tensor, width: int, is_last: bool
) -> torch.Tensor:
    """Split ranked continuations into the next b beams and those that finish, as transformers does.

    The first `width` that live, that is, do not stop and have any probability, are the next beams. Where they are
    fewer, some slots have no beam; those continue themselves, so that nothing is copied for them.

    Args:
        keys: [G, K], the best continuations in order.
        num_rows: Rows per group that they continue: 1, or b.
        vocab_size: V.
        stop_token_ids: [S] int64.
        width: Beams per group, b.
        is_last: The length is reached: the best b finish, whatever their token.

    Returns:
        `DeviceStep.packed`.
    """
    index, scores = from_keys(keys)
    missing = max(width - keys.shape[1], 0)  # of a tiny vocabulary
    index = torch.nn.functional.pad(index, (0, missing))
    scores = torch.nn.functional.pad(scores, (0, missing), value=NEVER)
    parents, tokens = index // vocab_size, index % vocab_size
    has_chance = scores > NEVER
    stops = (tokens[..., None] == stop_token_ids).any(dim=-1)
    lives = ~stops & has_chance
    lives &= lives.cumsum(dim=1) <= width

    chosen = _choose(parents, lives, width)
    has_beam = chosen < index.shape[1]
    rank = chosen.clamp(max=index.shape[1] - 1)
    itself = torch.arange(width, device=keys.device).clamp(max=num_rows - 1)
    fields = (
        torch.where(has_beam, parents.gather(1, rank), itself),
        tokens.gather(1, rank).masked_fill(~has_beam, 0),
        scores.gather(1, rank).masked_fill(~has_beam, NEVER).view(torch.int32),
        parents[:, :width],
        tokens[:, :width],
        scores[:, :width].contiguous().view(torch.int32),
        ((stops | is_last) & has_chance)[:, :width],
    )
    return torch.stack([field.int() for field in fields])


def _choose(parents: torch.Tensor, lives: torch.Tensor, width: int) -> torch.Tensor:
    """Which candidate [G, K] each slot takes, [G, b]; K where it takes none.

    As `search.step.assign_slots`: a first child stays in its parent's slot, the others take dead slots in order.
    """
    num_groups, num_ranked = parents.shape
    rank = torch.arange(num_ranked, device=parents.device).expand(num_groups, -1)
    none = torch.full((num_groups, width), num_ranked, device=parents.device)
    first_child = none.scatter_reduce(1, parents, rank.where(lives, num_ranked), "amin")
    is_first = first_child.gather(1, parents) == rank
    others = lives & ~is_first
    dead_slots = (first_child < num_ranked).int().argsort(dim=1, stable=True)
    nth_other = (others.cumsum(dim=1) - 1).clamp(min=0)
    slots = torch.where(is_first, parents, dead_slots.gather(1, nth_other))
    taken = slots.where(lives, width)  # what does not live goes to a column that is cut off
    return torch.nn.functional.pad(none, (0, 1)).scatter(1, taken, rank)[:, :width]
