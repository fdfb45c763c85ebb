"""The two messages between scheduler and worker, each one extra attribute of vLLM's own message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_trie.search.pruning import Pruning
from vllm_trie.search.step import Step
from vllm_trie.search.warping import Warping

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


class BeamSampling(NamedTuple):
    """Beam sampling: the next beams are drawn from the law of all continuations of all beams."""

    replacement: bool  # the same continuation may be drawn more than once
    min_width: int  # of a layer that is verified, in beams
    threshold: float | None  # how probably as many beams as that must be accepted; None: always all beams
    keeps_one: bool  # of the beams that one target forward leads to, only the best goes on


class SelectRules(NamedTuple):
    """How the worker selects in one step. Groups with equal rules are selected together."""

    width: int
    semantics: str
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    skip_special_tokens: bool  # in the text in which stop strings are looked for
    num_logprobs: int | None  # what each row must report; None: nothing
    is_controlled: bool  # penalties, biases, custom processors or the like act on the logits
    warping: Warping = Warping()
    pruning: Pruning = Pruning()
    masks_stops: bool = False  # min_tokens not reached: no hypothesis may stop here
    is_last: bool = False  # the length is reached: all hypotheses end here
    samples: bool = False  # each beam takes a token that is drawn for it
    handicap: tuple[int, float] | None = None  # token, and the factor of the score by which it is compared
    law: BeamSampling | None = None  # beams are drawn from it; None: the best go on

    @property
    def wants_rows(self) -> bool:
        """Whether each row's own best continuations matter, beside the group's."""
        return self.semantics == "vllm" or self.num_logprobs is not None

    @property
    def ranks_together(self) -> bool:
        """Whether all beams' continuations, those that finish among them, have one ranking that alone decides.

        In it, beams that are worse than whatever lives on have no say.
        """
        return self.semantics in ("hf", "tridecode") and self.pruning == Pruning()


RowBlocks = tuple[list[int], ...]  # block ids, by KV cache group


@dataclass(frozen=True)
class LentBlocks:
    """What a group has for one step to speculate with. It needs one KV cache group."""

    num_layers: int  # for which there is room, at least one
    spare_rows: list[list[int]]  # for each row beyond the group's own: its blocks from the newest token's on
    next_blocks: list[int] | None  # for each of its own: the next block, if the newest one may become full


@dataclass(frozen=True)
class Grant(LentBlocks):
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
    settled: list[int] | None = None  # on resumption, for the one row: what it computes beyond the prompt
    rows: list[RowBlocks] | None = None  # on widening: the KV blocks of each row
    resumed: Resumed | None = None  # on widening after a preemption; else the worker knows it all
    new_blocks: list[RowBlocks] | None = None  # at a block boundary: the next blocks of each row
    grant: Grant | None = None  # to speculate


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
