"""Which slot each of the next beams takes, such that copying rows never overwrites what is still needed."""

from __future__ import annotations

from functools import lru_cache

import torch

from vllm_trie.search.rank import Candidates


def select_next(
    candidates: Candidates[torch.Tensor], lives: torch.Tensor, width: int, num_rows: int
) -> Candidates[torch.Tensor]:
    """Let the first `width` candidates that live be the next beams, [G, b] by slot.

    Where they are fewer, some slots have no beam: score -inf, any token. Such a slot continues itself, or the last row
    there is, so that nothing is copied for it.

    Args:
        candidates: [G, K], the best first.
        lives: [G, K] bool, which of them may go on.
        width: Beams per group, b.
        num_rows: Rows per group that they continue: 1, or b.
    """
    return in_slots(candidates, choose(candidates.parents, lives, width), num_rows)


def choose(parents: torch.Tensor, lives: torch.Tensor, width: int) -> torch.Tensor:
    """Which candidate [G, K] each slot takes, [G, b]; K where it takes none.

    The first child of a parent stays in its parent's slot; every other child takes a dead slot, one whose own beam has
    no child, in ascending order. Sources (survivors) and destinations (dead slots) are therefore disjoint.
    """
    num_groups, count = parents.shape
    ranks = _ranks(count, parents.device)
    lives = lives & (lives.cumsum(dim=1) <= width)
    born = torch.where(lives, ranks, count)
    none = torch.full((num_groups, width), count, device=parents.device)
    first_child = none.scatter_reduce(1, parents, born, "amin")
    others = torch.nn.functional.pad(born, (0, 1), value=count).scatter(1, first_child, count).sort(dim=1).values
    is_dead = first_child == count
    nth_dead = is_dead.cumsum(dim=1).sub_(1).clamp_(min=0, max=count)
    return torch.where(is_dead, others.gather(1, nth_dead), first_child)


def in_slots(candidates: Candidates[torch.Tensor], chosen: torch.Tensor, num_rows: int) -> Candidates[torch.Tensor]:
    """The candidates [G, K] that slots have chosen, [G, b]."""
    count, width = candidates.tokens.shape[1], chosen.shape[1]
    has_beam, chosen = chosen < count, chosen.clamp(max=count - 1)
    itself = _ranks(width, chosen.device).clamp(max=num_rows - 1)
    parents, tokens, scores = (field.gather(1, chosen) for field in candidates)
    return Candidates(torch.where(has_beam, parents, itself), tokens, scores.where(has_beam, float("-inf")))


@lru_cache
def _ranks(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device)
