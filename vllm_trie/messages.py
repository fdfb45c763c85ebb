"""The messages between scheduler and worker, each one extra attribute of vLLM's own message."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm_trie.search.constraints.closed_nodes import NodeCodes
from vllm_trie.search.rules import SearchPhase, SearchRules
from vllm_trie.search.step_result import SearchStepResult

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

    from vllm_trie.trie.traced import DraftedForest


TICKET = "trie_beam_ticket"  # its key in `extra_args`
FORK = "trie_beam_fork"  # the key of a `ForkTicketMessage`, likewise
NO_HYPOTHESIS = "no further hypothesis"  # stop reason of what stands for one where there are fewer than n
BEAM_GROUPS = "beam_groups"  # what a `SchedulerOutput` has where a step has beams, or catalogs change
HYPOTHESES = "hypotheses"  # the key of `SentHypotheses` in an answer


class Caller(NamedTuple):
    """What the user of a search calls beam search, and the option that is its width: refusals speak of these."""

    feature: str = "beam_width"
    width: str = "beam_width"


BEAM_WIDTH = Caller()
USE_BEAM_SEARCH = Caller("use_beam_search", "use_beam_search with n")
LLM_BEAM_SEARCH = Caller("LLM.beam_search", "BeamSearchParams.beam_width")


@dataclass(frozen=True)
class GroupTicketMessage:
    """Put into the `extra_args` of a request that the front end has checked: how it is searched."""

    n: int  # outputs; to vLLM it is a request of one
    eos_token_id: int | None  # the tokenizer's, ignored or not
    options: dict[str, Any] = field(default_factory=dict)  # the request's and its engine's `BeamParams`, checked
    caller: Caller = BEAM_WIDTH
    item_set: bytes | None = None  # a catalog of its own
    exclusion: dict[str, Any] | None = None  # the fields of a `SentExclusion`
    padding: int | None = None  # the model's padding token, where it matters
    suppressed: tuple[list[int], list[int]] | None = None  # tokens that the model suppresses, anywhere and at first

    @classmethod
    def of(cls, params: SamplingParams | None) -> GroupTicketMessage | None:
        """The ticket of a request that the front end has checked; a client of a server can send no mapping."""
        ticket = ((params and params.extra_args) or {}).get(TICKET)
        return cls(**{**ticket, "caller": Caller(*ticket["caller"])}) if isinstance(ticket, dict) else None

    def to_dict(self) -> dict[str, Any]:
        """What `of` reads. No copies: nobody writes to what a ticket holds."""
        return dict(vars(self))

    def without_items(self, params: SamplingParams) -> GroupTicketMessage:
        """The same without the items it brings, in these params, too: whoever has taken them alone holds the bytes."""
        if self.item_set is None and self.exclusion is None:
            return self
        ticket = replace(self, item_set=None, exclusion=None)
        params.extra_args = {**(params.extra_args or {}), TICKET: ticket.to_dict()}
        return ticket

    @property
    def is_offline(self) -> bool:
        """Whether `LLM.beam_search` asks."""
        return self.caller == LLM_BEAM_SEARCH


class SentHypotheses(NamedTuple):
    """The hypotheses of an answer with several outputs, or of a search that was aborted, best first.

    Their tokens come one after the other in vLLM's output, and their log-probabilities, if these were asked for.
    """

    lengths: list[int]  # tokens
    finish_reasons: list[int]  # vLLM's `FinishReason`
    stop_reasons: list[int | None]
    cumulative_logprobs: list[float]
    are_aborted: bool = False  # none keeps its own reason: the search might have found better ones


class ForkTicketMessage(NamedTuple):
    """Put into the `extra_args` of a candidate: what it goes on from, and what others may go on from."""

    key: str | None = None  # under which its KV blocks are held once it is aborted, until this key is aborted, too
    parent: str | None = None  # the key of the one that it continues

    @classmethod
    def of(cls, params: SamplingParams | None) -> ForkTicketMessage | None:
        """The ticket of a candidate, which the front end let nobody else send."""
        ticket = ((params and params.extra_args) or {}).get(FORK)
        return cls(**ticket) if isinstance(ticket, dict) else None


MOST_DRAFTS = 512  # of a forest, which one row may have to hold


@dataclass(frozen=True)
class LookaheadBlocks:
    """What a group has for one step to speculate with."""

    num_layers: int  # for which there is room, at least one
    max_drafts: int  # for which there is room, at least one, however the rows share them
    next_blocks: list[list[int]]  # by KV cache group, of each row: the next one, if the newest may become full
    spare_blocks: list[list[int]]  # by KV cache group: behind those, for whichever rows have many drafts


@dataclass(frozen=True)
class SpeculationBudget(LookaheadBlocks):
    """What this step leaves over for a group to speculate with."""

    draft_width: int  # drafts of a layer
    phases: list[SearchPhase]  # of the steps after the first


class Resumed(NamedTuple):
    """Where the rows of a preempted group go on."""

    histories: np.ndarray  # [b, tokens] int32, all that each row has generated
    scores: np.ndarray  # [b] float32, their cumulative log-probabilities
    rank_scores: np.ndarray | None = None  # [b] float32, what they compete by, if not by these


class NewRows(NamedTuple):
    """What a group that fans out gives to its rows."""

    tables: list[np.ndarray]  # by KV cache group: [b, blocks] int32, all blocks of each row
    copies: np.ndarray  # [copies, 2] int64: a block, and the one that its content goes to before any row writes


@dataclass(slots=True)
class GroupStep:
    """What the worker must know about one beam group in one step."""

    phase: SearchPhase
    selects: bool  # False as long as tokens are computed that are known already
    search: SearchRules | None = None  # how it selects, whatever the phase, where its request is new to the worker
    decodes: bool = False  # the group runs as `width` rows; until then as one
    draw: tuple[int, int] | None = None  # seed and step, where something is drawn
    excludes: str | None = None  # where its rows enter: by which digest the worker knows the nodes closed to them
    rows: NewRows | None = None  # where it fans out
    resumed: Resumed | None = None  # where it fans out after a preemption; else the worker knows it all
    new_blocks: list[np.ndarray] | None = None  # at a block boundary, by KV cache group: [b] the next block of each
    budget: SpeculationBudget | None = None  # to speculate
    num_shared: list[int] | None = None  # where it decodes, by KV cache group: first tokens in blocks of all its rows
    is_traced: bool = False  # what it drafts is reported
    has_new_prefix: bool = False  # it contrasts, and others compute in this very step what it found in the prefix cache


@dataclass(frozen=True)
class CatalogChanges:
    """What workers must do to their catalogs before a step."""

    gone: dict[str, bool] = field(default_factory=dict)  # by digest of what to forget: whether all have it
    new: dict[str, bytes] = field(default_factory=dict)  # by digest: the content of those that came with requests
    closed: dict[str, NodeCodes] = field(default_factory=dict)  # by digest: the closed nodes of some searches


class DraftedMessage(NamedTuple):
    """What a group's forest was, and what came of it."""

    num_drafts: int  # nodes, the roots not counted
    num_layers: int
    draft_width: int  # drafts that a layer might have
    seconds: float  # of drafting, for all groups of the step together
    num_accepted: list[int]  # of them, those that became beams, by step; none in the first
    forest: DraftedForest | None = None  # where the search is traced
    num_computed: int = 0  # tokens that the target computed for it: nodes, or where a device grew it what may be some

    @property
    def is_forest(self) -> bool:
        """Whether there was one."""
        return self.draft_width > 0


NOT_DRAFTED = DraftedMessage(0, 0, 0, 0.0, [])
CANNOT_DRAFT = DraftedMessage(0, 0, -1, 0.0, [0])  # nor ever will: attention takes no trees


class DecidedMessage(NamedTuple):
    """What a group's search decided in one step of the engine: one step of its own, or several."""

    steps: list[SearchStepResult]
    drafted: DraftedMessage = NOT_DRAFTED  # if it did not speculate

    def as_arrays(self) -> list[np.ndarray]:
        """Which beams go on by which tokens, step by step."""
        return [field for step in self.steps for field in (step.parents, step.tokens)]


class RowMasks(NamedTuple):
    """Which tokens the grammars of groups allow next."""

    places: dict[str, slice]  # by group id: the masks of its rows
    bits: np.ndarray  # [R, V / 32] int32, a bit per token, the lowest first


def attach_group_messages(
    output: SchedulerOutput, groups: dict[str, GroupStep], changes: CatalogChanges | None
) -> None:
    """Send along the groups of this step, by request id, and what becomes of catalogs, if anything."""
    output.beam_groups = groups
    if changes is not None:
        output.beam_catalogs = (changes,)


def group_step_messages(output: SchedulerOutput) -> dict[str, GroupStep]:
    """The groups of this step, by request id."""
    return vars(output).get(BEAM_GROUPS, {})


def catalog_change_message(output: SchedulerOutput) -> tuple[CatalogChanges, ...]:
    """What becomes of catalogs: one or, as a rule, none."""
    return vars(output).get("beam_catalogs", ())


def attach_result_messages(output: ModelRunnerOutput, results: dict[str, DecidedMessage]) -> None:
    """Send what each group's search decided back with the step's output, by request id."""
    output.beam_results = results


def group_result_messages(output: ModelRunnerOutput) -> dict[str, DecidedMessage]:
    """What each group's search decided, by request id."""
    return vars(output).get("beam_results", {})


def attach_mask_message(output: GrammarOutput, masks: RowMasks) -> None:
    """Send the masks of groups along with those of ordinary requests."""
    output.beam_masks = masks


def row_mask_message(output: GrammarOutput | None) -> RowMasks | None:
    """The masks of groups, if there are any."""
    return vars(output).get("beam_masks") if output is not None else None
