"""Keeps, of the stop tokens that may follow an item, only those that may matter, however many there are."""

from __future__ import annotations

import torch

from vllm_trie.search.filters import SearchPruning
from vllm_trie.search.rank import rank_search_candidates

Fields = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def few_ends_for_strategy(
    fields: Fields, scores: torch.Tensor, num_ends: int, width: int, pruning: SearchPruning
) -> Fields:
    """Continuations of rows with fewer of the last ones, which end: only the best of each row, in order.

    Args:
        fields: [G, r, B], their scores, tokens and targets.
        scores: [G, r], of rows; both scores together are at most 0.
        num_ends: How many of each row's last continuations end.
        width: Beams of the search: no more of a row can be among the best.
        pruning: Its `per_parent` rule counts how many are better.
    """
    num_kept = _num_ends_for_strategy(width, pruning)
    if num_ends <= num_kept:
        return fields
    allowed, tokens, targets = fields
    first = allowed.shape[-1] - num_ends
    ends = allowed[..., first:].flatten(0, 1)[:, None]
    kept = rank_search_candidates(ends, scores.flatten()[:, None], num_kept).tokens.view(*scores.shape, num_kept)

    def some(field: torch.Tensor) -> torch.Tensor:
        return torch.cat([field[..., :first], field[..., first:].gather(-1, kept)], dim=-1)

    return some(allowed), some(tokens), some(targets)


def most_room_for_strategy(num_ends: int, width: int, pruning: SearchPruning) -> int:
    """For how many more continuations of a row there must be room: none where few may end it.

    Rows that many may end are taken in more parts, and then what is kept of the other parts takes memory, too.
    """
    return 2 * num_ends if num_ends > _num_ends_for_strategy(width, pruning) else 0


def _num_ends_for_strategy(width: int, pruning: SearchPruning) -> int:
    return max(width, pruning.per_parent or 0)
