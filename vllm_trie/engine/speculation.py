"""The seam of speculation in the scheduler: all that its core knows of steps that may be several.

`vllm_trie.speculation.engine` has what fills it in, which engines without drafts do not load.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from vllm_trie.engine.group import BeamGroup, BeamGroupForests
from vllm_trie.messages import DecidedMessage, DraftedMessage, GroupStep
from vllm_trie.options import BeamParams

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class Growing(NamedTuple):
    """A group that decodes one token a row in this step, so that a forest may grow from it."""

    group: BeamGroup
    request: Request
    step: GroupStep


class SchedulerBudgets(Protocol):
    """Shares out what steps leave over to searches that speculate."""

    def forests(self, params: BeamParams, width: int) -> BeamGroupForests:
        """Those of a search with these options, of so many beams."""

    def share_out(
        self, candidates: Sequence[Growing], output: SchedulerOutput, num_tokens: int, spare_tokens: int
    ) -> None:
        """Give budgets to the steps of groups; what they get is told to the worker in their `GroupStep`.

        Args:
            candidates: Which may have one.
            output: What vLLM has scheduled.
            num_tokens: That the step computes without forests.
            spare_tokens: Tokens of the step's budget that nobody computes.
        """

    def learn(self, group: BeamGroup, drafted: DraftedMessage, num_steps: int) -> None:
        """What came of a group's budget: so many steps of its search."""

    def finished(self, decided: Iterable[DecidedMessage]) -> None:
        """A step that computed something is over; this was decided in it."""
