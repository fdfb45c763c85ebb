"""The option `catalog_unique`: how many continuations a step must consider, and which items hypotheses are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_trie.options import BeamParams
from vllm_trie.search.unique_pools import NO_ITEM
from vllm_trie.trie.hypotheses import HypothesisTrie

if TYPE_CHECKING:
    from vllm_trie.catalog import Catalog

MOST_ENDING = 16_384  # continuations of a search that a step considers to find different items


def num_engine_ending_along(beam: BeamParams, catalog: Catalog, num_beams: int, num_stop_tokens: int) -> int | None:
    """How many of the best continuations contain as many different items as a group of beams is wide.

    Args:
        num_beams: Of the search, see `num_engine_beams_along`.
        num_stop_tokens: Under `catalog_stop` one of them follows the last item.

    Returns:
        At most `MOST_ENDING` over all groups, a limit that only a version of a catalog that was not checked can exceed;
        None if every step has at least as many beams.
    """
    width, most = num_beams // beam.num_beam_groups, MOST_ENDING // beam.num_beam_groups
    count = min(_num_engine_ending(beam, catalog, width, num_stop_tokens), most)
    return count if count > min([width, *(beam.beam_widths or ())]) else None


def widest_engine_search_of_unique_items(beam: BeamParams, catalog: Catalog, num_stop_tokens: int) -> int:
    """The greatest `beam_width`, at most the request's, with which at most `MOST_ENDING` continuations matter."""
    width, most = beam.beam_width // beam.num_beam_groups, MOST_ENDING // beam.num_beam_groups

    def num_ending(width: int) -> int:
        return _num_engine_ending(beam, catalog, width, num_stop_tokens)

    if num_ending(width) <= max(width, most):
        return beam.beam_width
    return beam.num_beam_groups * bisect_right(range(1, most + 1), most, key=num_ending)


def _num_engine_ending(beam: BeamParams, catalog: Catalog, width: int, num_stop_tokens: int) -> int:
    """See `num_engine_ending_along`: `width` - 1 different items, as often as each can occur, and one more.

    A beam can end as one item by each of its sequences and each stop token. Several beams can end as the same item if
    different sequences, or texts, precede their last item.
    """
    num_stops, most_alike = num_stop_tokens if beam.catalog_stop else 1, catalog.most_with_one_id
    num_items, num_beams = beam.catalog_items, width
    if beam.catalog_after is None:
        num_beams = min(width, most_alike ** min(num_items - 1, width.bit_length()))
    count = (width - 1) * num_beams * most_alike * num_stops + 1
    if beam.catalog_after is not None:
        return count
    return min(count, catalog.num_items ** min(num_items, count.bit_length()) * num_stops)  # all that exist


class GroupUniqueItems:
    """Numbers the items of a search's hypotheses, equal items equally.

    Args:
        trie: Of the hypotheses.
        item_ids: `GroupCatalogUse.item_ids` as a function of sequences only.
    """

    def __init__(self, trie: HypothesisTrie, item_ids: Callable[[Sequence[list[int]]], np.ndarray]) -> None:
        self._trie, self._item_ids = trie, item_ids
        self._of_finished = dict[int, int]()  # by leaf
        self._of_several = dict[tuple[int, ...], int]()  # by ids

    def of(self, leaves: np.ndarray) -> np.ndarray:
        """[n] int64 numbers of hypotheses [n], finished or not; `NO_ITEM` if they are not whole items."""
        known, found = self._of_finished, dict[int, int]()
        if others := [leaf for leaf in leaves.tolist() if leaf not in known]:
            found = dict(zip(others, self._looked_up(others), strict=True))
            known.update((leaf, item) for leaf, item in found.items() if leaf >= 0)  # the tokens of rows change
        return np.array([known[leaf] if leaf in known else found[leaf] for leaf in leaves.tolist()], np.int64)

    def _looked_up(self, leaves: list[int]) -> list[int]:
        ids = self._item_ids(self._trie.tokens(leaves)).tolist()
        if not isinstance(ids[0], list):
            return ids
        numbers = self._of_several
        return [NO_ITEM if NO_ITEM in each else numbers.setdefault(tuple(each), len(numbers)) for each in ids]
