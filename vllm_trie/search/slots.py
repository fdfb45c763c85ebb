"""Which slot each of the next beams takes, such that copying rows never overwrites what is still needed."""

from __future__ import annotations

import torch

from vllm_trie.search.devices import NEVER, filled_for_search, is_searched_on_host, search_numbers
from vllm_trie.search.rank import SearchCandidates, pick_search_candidates


def choose_next_search_beams(
    candidates: SearchCandidates[torch.Tensor], lives: torch.Tensor, width: int, num_rows: int
) -> SearchCandidates[torch.Tensor]:
    """Let the first `width` candidates that live be the next beams, [G, b] by slot.

    Where they are fewer, some slots have no beam: score -inf, any token. Such a slot continues itself, or the only
    row there is, so that nothing is copied for it.

    Args:
        candidates: [G, K], the best first.
        lives: [G, K] bool, which of them may go on.
        width: Beams per group, b.
        num_rows: Rows per group that they continue: 1, or b.
    """
    return in_search_slots(candidates, choose_search_slots(candidates.parents, lives, width), num_rows)


def choose_search_slots(parents: torch.Tensor, lives: torch.Tensor, width: int) -> torch.Tensor:
    """Which candidate [G, K] each slot takes, [G, b]; K where it takes none.

    The first child of a parent stays in its parent's slot; every other child takes a dead slot, one whose own beam has
    no child, in ascending order. Sources (survivors) and destinations (dead slots) are therefore disjoint.
    """
    (num_groups, count), device = parents.shape, parents.device
    never = count + 1  # later than the last that lives on, which is K if fewer than b do
    born = torch.where(lives, search_numbers(count, device), filled_for_search((), never, device))
    first_child = filled_for_search((num_groups, width), never, device).scatter_reduce(1, parents, born, "amin")
    is_other = lives & (first_child.gather(1, parents) != born)
    last = torch.searchsorted(lives.cumsum(dim=1), filled_for_search((num_groups, 1), width, device))
    is_dead = first_child > last
    nth_other = torch.searchsorted(is_other.cumsum(dim=1), is_dead.cumsum(dim=1))
    return torch.where(is_dead, nth_other, first_child)


def in_search_slots(
    candidates: SearchCandidates[torch.Tensor], chosen: torch.Tensor, num_rows: int
) -> SearchCandidates[torch.Tensor]:
    """The candidates [G, K] that slots have chosen, [G, b]."""
    count, width = candidates.tokens.shape[1], chosen.shape[1]
    if is_searched_on_host(chosen.device) and max(map(max, chosen.tolist())) < count:  # every slot has a beam
        return pick_search_candidates(candidates, chosen)
    has_beam = chosen < count
    parents, tokens, scores = pick_search_candidates(candidates, chosen.clamp(max=count - 1))
    itself = search_numbers(width, chosen.device, num_rows - 1)
    return SearchCandidates(torch.where(has_beam, parents, itself), tokens, scores.where(has_beam, NEVER))
