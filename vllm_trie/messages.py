"""The messages between front end, scheduler and worker; each travels as an extra attribute of a message of vLLM."""

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


TICKET = "trie_beam_ticket"  # the key of a `GroupTicketMessage` in `extra_args`
FORK = "trie_beam_fork"  # the key of a `ForkTicketMessage` in `extra_args`
NO_HYPOTHESIS = "no further hypothesis"  # stop reason of the outputs that fill up `n` if fewer hypotheses were found
BEAM_GROUPS = "beam_groups"  # attribute of a `SchedulerOutput` whose step has beams or changes catalogs
HYPOTHESES = "hypotheses"  # the key of `SentHypotheses` in an answer


class Caller(NamedTuple):
    """The user's names for beam search and for its width, as refusals quote them."""

    feature: str = "beam_width"
    width: str = "beam_width"


BEAM_WIDTH = Caller()
USE_BEAM_SEARCH = Caller("use_beam_search", "use_beam_search with n")
LLM_BEAM_SEARCH = Caller("LLM.beam_search", "BeamSearchParams.beam_width")


@dataclass(frozen=True)
class GroupTicketMessage:
    """How a request is searched; the front end puts it into the `extra_args` of a request that it has checked."""

    n: int  # outputs; vLLM sees a request for one
    eos_token_id: int | None  # of the tokenizer, even under `ignore_eos`
    options: dict[str, Any] = field(default_factory=dict)  # `BeamParams`, checked, with the engine's defaults
    caller: Caller = BEAM_WIDTH
    item_set: bytes | None = None  # a catalog that came with the request
    exclusion: dict[str, Any] | None = None  # the fields of a `SentExclusion`
    padding: int | None = None  # the model's padding token, if the search depends on it
    suppressed: tuple[list[int], list[int]] | None = None  # tokens suppressed everywhere, and as the first token
    timestamps: tuple[int, int, int | None] | None = None  # of the rules of timestamps, see `model_timestamp_rules`

    @classmethod
    def of(cls, params: SamplingParams | None) -> GroupTicketMessage | None:
        """The ticket in these params, if any; a client of a server cannot forge one, as it cannot send a mapping."""
        ticket = ((params and params.extra_args) or {}).get(TICKET)
        return cls(**{**ticket, "caller": Caller(*ticket["caller"])}) if isinstance(ticket, dict) else None

    def to_dict(self) -> dict[str, Any]:
        """The form that `of` reads. Values are shared, not copied: nobody writes to them."""
        return dict(vars(self))

    def without_items(self, params: SamplingParams) -> GroupTicketMessage:
        """This ticket without its items, also in `params`: once taken, their bytes are held in one place only."""
        if self.item_set is None and self.exclusion is None:
            return self
        ticket = replace(self, item_set=None, exclusion=None)
        params.extra_args = {**(params.extra_args or {}), TICKET: ticket.to_dict()}
        return ticket

    @property
    def is_offline(self) -> bool:
        """Whether `LLM.beam_search` made the request."""
        return self.caller == LLM_BEAM_SEARCH


class SentHypotheses(NamedTuple):
    """The hypotheses of an answer with several outputs, or of a search that was aborted, best first.

    Their tokens, and log-probabilities if requested, are concatenated in vLLM's output.
    """

    lengths: list[int]  # in tokens
    finish_reasons: list[int]  # vLLM's `FinishReason`
    stop_reasons: list[int | None]
    cumulative_logprobs: list[float]
    are_aborted: bool = False  # all report "abort": the search might have found better ones


class ForkTicketMessage(NamedTuple):
    """Which candidate's KV blocks a step candidate continues, and under which key its own are held for others."""

    key: str | None = None  # its KV blocks are held under this key once it is aborted, until the key is aborted
    parent: str | None = None  # the key of the candidate that it continues

    @classmethod
    def of(cls, params: SamplingParams | None) -> ForkTicketMessage | None:
        """The ticket in these params, if any; the front end refuses it from users."""
        ticket = ((params and params.extra_args) or {}).get(FORK)
        return cls(**ticket) if isinstance(ticket, dict) else None


MOST_DRAFTS = 512  # of a forest; a single row may have to hold all of them


@dataclass(frozen=True)
class LookaheadBlocks:
    """The KV blocks into which a group may write drafts in one step."""

    num_layers: int  # layers that fit, at least one
    max_drafts: int  # drafts that fit however the rows share them, at least one
    next_blocks: list[list[int]]  # by KV cache group, per row: the next block, if the newest may fill up
    spare_blocks: list[list[int]]  # by KV cache group: further blocks, for whichever rows have many drafts


@dataclass(frozen=True)
class SpeculationBudget(LookaheadBlocks):
    """What a group may use of a step's spare capacity to speculate."""

    draft_width: int  # drafts per layer
    phases: list[SearchPhase]  # of the steps after the first


class Resumed(NamedTuple):
    """The state from which the rows of a preempted group resume."""

    histories: np.ndarray  # [b, tokens] int32, the generated tokens of each row
    scores: np.ndarray  # [b] float32, their cumulative log-probabilities
    rank_scores: np.ndarray | None = None  # [b] float32, by which they compete, if not by `scores`


class NewRows(NamedTuple):
    """The KV blocks of the rows of a group that fans out from its prompt."""

    tables: list[np.ndarray]  # by KV cache group: [b, blocks] int32, all blocks of each row
    copies: np.ndarray  # [copies, 2] int64: source and destination blocks, copied before any row writes


@dataclass(slots=True)
class GroupStep:
    """One beam group in one engine step, as the scheduler describes it to the worker."""

    phase: SearchPhase
    selects: bool  # False while known tokens are computed: the prompt, or a history after a preemption
    search: SearchRules | None = None  # how it selects in all phases; sent when the request is new to the worker
    decodes: bool = False  # the group runs as `width` rows; until then as one
    sampling_key: tuple[int, int] | None = None  # seed and step, if the step samples
    excludes: str | None = None  # when its rows enter: digest of the nodes closed to them
    rows: NewRows | None = None  # when it fans out
    resumed: Resumed | None = None  # when it fans out after a preemption; otherwise the worker has this state
    new_blocks: list[np.ndarray] | None = None  # at a block boundary, by KV cache group: [b] the next block of each row
    budget: SpeculationBudget | None = None  # if it may speculate
    num_shared: list[int] | None = None  # when it decodes, by KV cache group: leading tokens in blocks of all rows
    is_traced: bool = False  # report its drafts
    has_new_prefix: bool = False  # it contrasts, and its cached prefix is computed by others in this same step


@dataclass(frozen=True)
class CatalogChanges:
    """What workers must do to their catalogs before a step."""

    gone: dict[str, bool] = field(default_factory=dict)  # digest to forget -> whether all workers have it
    new: dict[str, bytes] = field(default_factory=dict)  # digest -> content of a catalog that came with a request
    closed: dict[str, NodeCodes] = field(default_factory=dict)  # digest -> nodes closed to some searches


class DraftedMessage(NamedTuple):
    """A group's draft forest in one step: its size, cost and accepted drafts."""

    num_drafts: int  # nodes without the roots
    num_layers: int
    draft_width: int  # drafts per layer at most
    seconds: float  # spent on drafting, for all groups of the step together
    num_accepted: list[int]  # per search step: drafts that became beams; 0 in the first
    forest: DraftedForest | None = None  # if the search is traced
    num_computed: int = 0  # tokens that the target computed for it: its nodes, or room for them if grown on a device

    @property
    def is_forest(self) -> bool:
        """Whether there was a forest."""
        return self.draft_width > 0


NOT_DRAFTED = DraftedMessage(0, 0, 0, 0.0, [])
CANNOT_DRAFT = DraftedMessage(0, 0, -1, 0.0, [0])  # in no step: the attention backend supports no trees


class DecidedMessage(NamedTuple):
    """What a group's search decided in one engine step, which is one search step, or several if it speculates."""

    steps: list[SearchStepResult]
    drafted: DraftedMessage = NOT_DRAFTED

    def as_arrays(self) -> list[np.ndarray]:
        """Parents and tokens of the beams, search step by search step."""
        return [field for step in self.steps for field in (step.parents, step.tokens)]


class RowMasks(NamedTuple):
    """The tokens that the grammars of groups allow next."""

    places: dict[str, slice]  # group id -> its rows in `bits`
    bits: np.ndarray  # [R, V / 32] int32, a bit per token, the lowest first


def attach_group_messages(
    output: SchedulerOutput, groups: dict[str, GroupStep], changes: CatalogChanges | None
) -> None:
    """Attach the groups of this step, by request id, and changes of catalogs, if any."""
    output.beam_groups = groups
    if changes is not None:
        output.beam_catalogs = (changes,)


def group_step_messages(output: SchedulerOutput) -> dict[str, GroupStep]:
    """The groups of this step, by request id."""
    return vars(output).get(BEAM_GROUPS, {})


def catalog_change_message(output: SchedulerOutput) -> tuple[CatalogChanges, ...]:
    """The changes of catalogs in this step: one, or usually none."""
    return vars(output).get("beam_catalogs", ())


def attach_result_messages(output: ModelRunnerOutput, results: dict[str, DecidedMessage]) -> None:
    """Attach what each group's search decided, by request id."""
    output.beam_results = results


def group_result_messages(output: ModelRunnerOutput) -> dict[str, DecidedMessage]:
    """What each group's search decided, by request id."""
    return vars(output).get("beam_results", {})


def attach_mask_message(output: GrammarOutput, masks: RowMasks) -> None:
    """Attach the grammar masks of groups."""
    output.beam_masks = masks


def row_mask_message(output: GrammarOutput | None) -> RowMasks | None:
    """The grammar masks of groups, if any."""
    return vars(output).get("beam_masks") if output is not None else None
