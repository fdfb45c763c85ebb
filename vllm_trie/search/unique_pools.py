"""A pool in which several finished hypotheses may be the same item: only the best of each item counts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vllm_trie.search.stopping import EarlyStopping, FinishedSearchHypotheses, HfSearchPool

NO_ITEM = -1  # of a hypothesis that is no whole item: it differs from every other
ItemsOf = Callable[[np.ndarray], np.ndarray]  # from leaves [n] to [n] int64: leaves of the same item have equal numbers


class UniqueSearchPool(HfSearchPool):
    """The best `width` finished hypotheses of different items, each the best of its item.

    Args:
        items_of: Maps leaves to their items.
    """

    def __init__(
        self, width: int, length_penalty: float, max_length: int, early_stopping: EarlyStopping, items_of: ItemsOf
    ) -> None:
        super().__init__(width, length_penalty, max_length, early_stopping)
        self._items_of = items_of

    def finishing(self, leaves: np.ndarray, ranks: np.ndarray, num_ranked: int, most: int) -> np.ndarray:
        """See `SearchPool`: the best of each item; the others do not count among the best `most`."""
        is_best = are_best_of_search_items(self._items_of(leaves))
        return is_best & (ranks - np.cumsum(~is_best) < most)

    def best_of(self, count: int, *parts: FinishedSearchHypotheses) -> FinishedSearchHypotheses:
        hypotheses = FinishedSearchHypotheses.in_order(*parts)
        is_best = are_best_of_search_items(self._items_of(hypotheses.leaves))
        return hypotheses.some(np.flatnonzero(is_best)[:count])

    def _keep_best(self, hypotheses: FinishedSearchHypotheses) -> np.ndarray:
        self._finished = self.best_of(self.width, hypotheses)
        return hypotheses.leaves[~np.isin(hypotheses.leaves, self._finished.leaves)]


def are_best_of_search_items(items: np.ndarray) -> np.ndarray:
    """[n] bool, whether each hypothesis is the best of its item; `items` [n] are in order, the best first."""
    is_best = items == NO_ITEM
    is_best[np.unique(items, return_index=True)[1]] = True
    return is_best
