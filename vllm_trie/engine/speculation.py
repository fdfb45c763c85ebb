"""The scheduler's interface to speculation, by which one engine step may be several search steps.

`vllm_trie.speculation.engine` implements it; only engines with drafts load that.
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


class DraftingCandidate(NamedTuple):
    """A group that decodes one token per row in this step, so that it may draft a forest."""

    group: BeamGroup
    request: Request
    step: GroupStep


class SchedulerBudgets(Protocol):
    """Shares out the spare capacity of steps among searches that speculate."""

    def forests(self, params: BeamParams, width: int) -> BeamGroupForests:
        """The forests of a search with these options and so many beams."""

    def share_out(
        self,
        candidates: Sequence[DraftingCandidate],
        output: SchedulerOutput,
        num_tokens: int,
        spare_tokens: int,
        num_rows: int,
    ) -> None:
        """Give budgets to groups, in the `GroupStep` that is sent to the worker.

        Args:
            candidates: The groups that may get one.
            output: What vLLM has scheduled.
            num_tokens: Tokens that the step computes without forests.
            spare_tokens: Unused tokens of the step's budget.
            num_rows: Rows of all requests but prompts, if the next step is scheduled before groups return KV blocks;
                else 0.
        """

    def learn(self, group: BeamGroup, drafted: DraftedMessage, num_steps: int) -> None:
        """Record the outcome of a group's budget: its forest, and the number of search steps."""

    def finished(self, decided: Iterable[DecidedMessage]) -> None:
        """Record the decisions of an engine step that computed something."""
