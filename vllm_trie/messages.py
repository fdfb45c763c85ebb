"""The two messages between scheduler and worker, each one extra attribute of vLLM's own message."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm_trie.search.rules import SelectRules
from vllm_trie.search.step import Step

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


TICKET = "trie_beam_ticket"  # its key in `extra_args`

RowBlocks = tuple[list[int], ...]  # block ids, by KV cache group


class Caller(NamedTuple):
    """What the user of a search calls beam search, and the option that is its width."""

    feature: str = "beam_width"
    width: str = "beam_width"

    def in_its_words(self, message: str) -> str:
        """A refusal that speaks of `beam_width`, as this user would put it."""
        return _BEAM_WIDTH.sub(lambda m: m[0].replace("beam_width", self[any(m.groups())]), message)


_BEAM_WIDTH = re.compile(r"(did you mean )?\bbeam_width( <=|=| is| hypotheses)?")  # a group: the number is meant
BEAM_WIDTH = Caller()
USE_BEAM_SEARCH = Caller("use_beam_search", "use_beam_search with n")
LLM_BEAM_SEARCH = Caller("LLM.beam_search", "BeamSearchParams.beam_width")


@dataclass(frozen=True)
class GroupTicket:
    """Put into `extra_args` before vLLM fans n outputs out into n requests, so that they find together."""

    key: str
    n: int
    eos_token_id: int | None  # the tokenizer's, ignored or not
    options: dict[str, Any] = field(default_factory=dict)  # the request's and its engine's `BeamParams`, checked
    caller: Caller = BEAM_WIDTH

    @classmethod
    def of(cls, params: SamplingParams | None) -> GroupTicket | None:
        """The ticket of a request that the front end has checked; a client of a server can send no mapping."""
        ticket = ((params and params.extra_args) or {}).get(TICKET)
        return cls(**{**ticket, "caller": Caller(*ticket["caller"])}) if isinstance(ticket, dict) else None

    @property
    def is_offline(self) -> bool:
        """Whether `LLM.beam_search` asks."""
        return self.caller == LLM_BEAM_SEARCH

    def index_of(self, request_id: str) -> int:
        """Which of the n outputs a request is the return address of; 0 stands for the group itself.

        For n > 1 vLLM names the requests "{index}_{parent id}", whatever the parent's id looks like.
        """
        return int(request_id.partition("_")[0]) if self.n > 1 else 0


@dataclass(frozen=True)
class LookaheadBlocks:
    """What a group has for one step to speculate with."""

    num_layers: int  # for which there is room, at least one
    spare_rows: list[RowBlocks]  # for each row beyond the group's own: its blocks from the newest token's on
    next_blocks: list[list[int]]  # by KV cache group, of each of its own: the next one, if the newest may become full


@dataclass(frozen=True)
class SpeculationBudget(LookaheadBlocks):
    """What this step leaves over for a group to speculate with."""

    draft_width: int  # drafts of a layer
    max_tokens: int  # that all of the forest's rows together may compute
    rules: list[SelectRules]  # of the steps after the first


class Resumed(NamedTuple):
    """Where the rows of a preempted group go on."""

    histories: list[list[int]]  # all that each row has generated
    scores: list[float]  # their cumulative log-probabilities


@dataclass(slots=True)
class GroupStep:
    """What the worker must know about one beam group in one step."""

    rules: SelectRules
    selects: bool  # False as long as tokens are computed that are known already
    decodes: bool = False  # the group runs as `width` rows; until then as one
    draw: tuple[int, int] | None = None  # seed and step, where something is drawn
    rows: list[RowBlocks] | None = None  # where it fans out: the KV blocks of each row
    resumed: Resumed | None = None  # where it fans out after a preemption; else the worker knows it all
    new_blocks: list[RowBlocks] | None = None  # at a block boundary: the next blocks of each row
    budget: SpeculationBudget | None = None  # to speculate


class Drafted(NamedTuple):
    """What a group's forest was, and what came of it."""

    num_drafts: int  # nodes, the roots not counted
    num_accepted: list[int]  # of them, those that became beams, by step; none in the first


class Decided(NamedTuple):
    """What a group's search decided in one step of the engine: one step of its own, or several."""

    steps: list[Step]
    drafted: Drafted | None = None  # None: it did not speculate

    def as_arrays(self) -> list[np.ndarray]:
        """Which beams go on by which tokens, step by step."""
        return [field for step in self.steps for field in (step.parents, step.tokens)]


def attach_group_steps(output: SchedulerOutput, groups: dict[str, GroupStep]) -> None:
    """Send the groups of this step along, by request id."""
    output.beam_groups = groups


def group_steps(output: SchedulerOutput) -> dict[str, GroupStep]:
    """The groups of this step, by request id; empty if vLLM made the message itself (warm-up)."""
    return vars(output).get("beam_groups", {})


def attach_results(output: ModelRunnerOutput, results: dict[str, Decided]) -> None:
    """Send what each group's search decided back with the step's output, by request id."""
    output.beam_results = results


def group_results(output: ModelRunnerOutput) -> dict[str, Decided]:
    """What each group's search decided, by request id."""
    return vars(output).get("beam_results", {})
