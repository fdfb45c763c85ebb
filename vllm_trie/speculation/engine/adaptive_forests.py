"""Sizes the next forest of a search under `speculation="auto"`: as large as pays off, or none.

The cost of a step is its time from scheduling to results, measured in engine steps that compute no prompts. Results do
not depend on any of this.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import NamedTuple

from vllm_trie.messages import DecidedMessage, DraftedMessage
from vllm_trie.options.speculation import DRAFTS_PER_BEAM, MOST_DRAFTS_PER_BEAM
from vllm_trie.speculation.engine.group_forests import GroupForests
from vllm_trie.speculation.search.forest_size import PLAIN, DraftAcceptance, ForestSize, StepCosts, fastest_forest_size

LEAST_STEPS = 2  # of a kind, before its costs are used
LEAST_REST, MOST_REST = 8, 64  # plain steps before the next forest is considered: twice as many each time


class _Scheduled(NamedTuple):
    """A step that is scheduled and whose results are not in yet."""

    at: float  # seconds
    num_tokens: int  # without those of forests
    is_steady: bool  # every row computes one token, and nothing of a prompt


class AdaptiveForests:
    """Chooses the sizes of forests for the groups of one engine.

    Args:
        num_layers: The most layers of a forest.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._costs = StepCosts()
        self._of_all: dict[tuple[int, int], DraftAcceptance] = defaultdict(lambda: DraftAcceptance(num_layers))
        self._rests: dict[int, int] = defaultdict(lambda: LEAST_REST)  # the last rest, by width
        self._scheduled = deque[_Scheduled]()
        self._last_results = 0.0

    def choose(self, group: GroupForests, length: int, most_layers: int, num_tokens: int) -> ForestSize:
        """The size of a group's next forest.

        Args:
            group: A group that may speculate in this step.
            length: Length of its beams, in tokens.
            most_layers: The most layers that the forest may have.
            num_tokens: Tokens that the step computes without the forest.
        """
        if self._costs.plain.count < LEAST_STEPS:
            group.rest(length, LEAST_REST)
            return PLAIN
        acceptance = self._acceptance(group)
        if self._costs.verifying.count < LEAST_STEPS:
            return ForestSize(most_layers, min(acceptance))
        for draft_width, of_group in acceptance.items():
            of_group.forget()
            self._of_all[group.width, draft_width].forget()
        size = fastest_forest_size(self._costs, acceptance, most_layers, num_tokens)
        if size == PLAIN:
            num_steps = min(2 * group.num_rested, MOST_REST) if group.num_rested else self._rests[group.width]
            self._rests[group.width] = num_steps
            group.rest(length, num_steps)
        else:
            self._rests[group.width], group.num_rested = LEAST_REST, 0
        return size

    def scheduled(self, num_tokens: int, is_steady: bool) -> None:
        """Notes that a step which computes something begins. Results arrive in the order of steps.

        A plain step may begin before the results of the previous one are in. The time of a step is then measured from
        results to results: the first of several seems longer and the last shorter, but their sum is right.
        """
        self._scheduled.append(_Scheduled(time.perf_counter(), num_tokens, is_steady))

    def finished(self, results: Iterable[DecidedMessage]) -> None:
        """Notes that the results of the oldest scheduled step are in."""
        step, now = self._scheduled.popleft(), time.perf_counter()
        seconds, self._last_results = now - max(step.at, self._last_results), now
        if not step.is_steady:
            return
        forests = [decided.drafted for decided in results if decided.drafted.is_forest]
        if not forests:
            self._costs.plain.observe((1, step.num_tokens), seconds)
            return
        drafting = forests[0].seconds  # of all forests together
        num_layers, num_tokens = max(forest.num_layers for forest in forests), sum(f.num_computed for f in forests)
        self._costs.drafting.observe((1, num_layers, num_tokens), drafting)
        self._costs.verifying.observe((1, step.num_tokens + num_tokens), seconds - drafting)

    def learn(self, group: GroupForests, forest: DraftedMessage, num_steps: int) -> None:
        """Records the outcome of a forest: how many steps it gave its group's search."""
        acceptance = self._acceptance(group)
        if forest.draft_width in acceptance:
            acceptance[forest.draft_width].observe(forest.num_layers, num_steps)
            self._of_all[group.width, forest.draft_width].observe(forest.num_layers, num_steps)

    def _acceptance(self, group: GroupForests) -> dict[int, DraftAcceptance]:
        """The group's acceptance, by draft width."""
        if not group.acceptance:
            narrow, wide = (factor * group.width for factor in (DRAFTS_PER_BEAM, MOST_DRAFTS_PER_BEAM))
            most = min(group.most_drafts, wide)
            group.acceptance = {
                draft_width: DraftAcceptance(self._num_layers, self._of_all[group.width, draft_width])
                for draft_width in sorted({min(narrow, most), most})
            }
        return group.acceptance
