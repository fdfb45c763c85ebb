"""Where the hypotheses of group beam search compete: each group has its own pool and ends independently."""

from __future__ import annotations

import numpy as np

from vllm_trie.search.stopping import (
    NO_FINISHED,
    EndedSearchHypotheses,
    FinishedSearchHypotheses,
    HfSearchPool,
    SearchPool,
    are_search_tokens_among,
)


class SearchGroupPools(SearchPool):
    """The pools of all groups; in the end all their hypotheses compete.

    A group is judged done by the best of its candidates, including those that stop. What reaches the maximum length in
    the last step counts only if its group is not done. Source: transformers 4.56 `BeamSearchScorer`.

    Args:
        pools: By group.
        stop_token_ids: Tokens that end a hypothesis; None: whatever ends is a whole item, also in the last step.
    """

    def __init__(self, pools: list[HfSearchPool], stop_token_ids: frozenset[int] | None) -> None:
        self.pools = pools
        self.stop_token_ids = stop_token_ids

    def advance(self, ended: EndedSearchHypotheses, running: np.ndarray, length: int) -> tuple[np.ndarray, bool]:
        outdone, is_over = [NO_FINISHED.leaves], True
        groups = ended.rows * len(self.pools) // len(running)
        stops = np.ones(len(groups), dtype=bool)
        if self.stop_token_ids is not None and length == self.pools[0].max_length:
            stops = are_search_tokens_among(ended.last_tokens, self.stop_token_ids)
        for number, (pool, of_group) in enumerate(zip(self.pools, np.split(running, len(self.pools)), strict=True)):
            too_late = ended.some(groups == number)
            if number not in self.done:
                stopped, too_late = too_late.some(stops[groups == number]), too_late.some(~stops[groups == number])
                outdone.append(pool.add(stopped, length))
                best = float(of_group.max())
                if pool.is_done(max([best, *stopped.sums.tolist()]), length):
                    self.done += (number,)
                else:
                    outdone.append(pool.add(too_late, length))
                    is_over = is_over and best == -np.inf
                    continue
            outdone.append(too_late.leaves)
        return np.concatenate(outdone), is_over

    def finishing(self, leaves: np.ndarray, ranks: np.ndarray, num_ranked: int, most: int) -> np.ndarray:
        groups, ranks = np.divmod(ranks, num_ranked)
        finishes = [
            pool.finishing(leaves[groups == number], ranks[groups == number], num_ranked, most)
            for number, pool in enumerate(self.pools)
        ]
        return np.concatenate(finishes)

    def scores(self, sums: np.ndarray, length: int, last_tokens: np.ndarray) -> np.ndarray:
        return self.pools[0].scores(sums, length, last_tokens)

    def best_so_far(self, count: int, running: EndedSearchHypotheses, length: int) -> FinishedSearchHypotheses:
        groups = np.arange(len(running.leaves)) * len(self.pools) // max(len(running.leaves), 1)
        return super().best_so_far(count, running.some(~np.isin(groups, self.done)), length)

    def best(self, count: int) -> FinishedSearchHypotheses:
        return self.best_of(count, *(pool.best(count) for pool in self.pools))

    def best_of(self, count: int, *parts: FinishedSearchHypotheses) -> FinishedSearchHypotheses:
        return self.pools[0].best_of(count, *parts)
