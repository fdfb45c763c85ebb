"""Where the hypotheses of group beam search compete: each group has a pool of its own, and is done by itself."""

from __future__ import annotations

from itertools import chain

import numpy as np

from vllm_trie.search.stopping import Ended, Finished, HfPool, Pool


class GroupPools(Pool):
    """The pools of all groups; in the end all their hypotheses compete.

    A group is done, or not, by the best of its candidates, those that stop among them. What runs out of length in the
    last step counts only if it is not. Source: transformers 4.56 `BeamSearchScorer`.

    Args:
        pools: By group.
        stop_token_ids: Which end a hypothesis; None: whatever ends is a whole item, in the last step, too.
    """

    def __init__(self, pools: list[HfPool], stop_token_ids: frozenset[int] | None) -> None:
        self.pools = pools
        self.stop_token_ids = stop_token_ids
        self.done: tuple[int, ...] = ()  # which groups are

    def advance(self, ended: Ended, running: np.ndarray, length: int) -> tuple[list[Finished], bool]:
        outdone, is_over = list[Finished](), True
        groups = np.array(ended.rows, dtype=np.int64) * len(self.pools) // len(running)
        stops = np.ones(len(groups), dtype=bool)
        if self.stop_token_ids is not None and length == self.pools[0].max_length:
            stops = np.array([token in self.stop_token_ids for token in ended.last_tokens], dtype=bool)
        for number, (pool, of_group) in enumerate(zip(self.pools, np.split(running, len(self.pools)), strict=True)):
            too_late = ended.some(groups == number)
            if number not in self.done:
                stopped, too_late = too_late.some(stops[groups == number]), too_late.some(~stops[groups == number])
                outdone += pool.add(stopped.sums, length, stopped.last_tokens, stopped.leaves)
                best = float(of_group.max())
                if pool.is_done(max([best, *stopped.sums]), length):
                    self.done += (number,)
                else:
                    outdone += pool.add(too_late.sums, length, too_late.last_tokens, too_late.leaves)
                    is_over = is_over and best == -np.inf
                    continue
            outdone += map(Finished, too_late.sums, too_late.leaves)
        return outdone, is_over

    def score(self, sum_logprobs: float, length: int, last_token: int) -> float:
        return self.pools[0].score(sum_logprobs, length, last_token)

    def best_so_far(self, count: int, running: Ended, length: int) -> list[Finished]:
        groups = np.arange(len(running.leaves)) * len(self.pools) // max(len(running.leaves), 1)
        return super().best_so_far(count, running.some(~np.isin(groups, self.done)), length)

    def best(self, count: int) -> list[Finished]:
        found = chain(*(pool.best(count) for pool in self.pools))
        return sorted(found, key=lambda finished: -finished.score)[:count]
