"""The context of one engine step in the worker: what one hook of the runner passes to another."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from vllm_trie.messages import CANNOT_DRAFT, NOT_DRAFTED, DecidedMessage, GroupStep
from vllm_trie.search.step_result import SearchResultLayout, unpack_search_steps
from vllm_trie.worker.attention.shared_rows import RowTrees
from vllm_trie.worker.rows.rows import BatchRows


class DraftForest(Protocol):
    """The drafts of one group for one step: a tree in the row of each beam."""

    @property
    def num_layers(self) -> int:
        """Search steps that it may make possible besides the first."""

    def trees(self, rows: BatchRows) -> RowTrees:
        """The trees, for attention, in the batch of these rows."""


class SelectedCohort(NamedTuple):
    """The decision of a step of groups with equal rules, on the device."""

    group_ids: list[str]
    packed: torch.Tensor  # [G, n] int32
    layout: SearchResultLayout


@dataclass(slots=True)
class RunnerStepContext:
    """One step of the engine, from `execute_model` to `sample_tokens`: everything that one hook passes to another.

    For a step with groups, `decided_at` is the event in the device's stream after which everything is decided.
    """

    steps: dict[str, GroupStep] = field(default_factory=dict)  # of the step's groups, by id
    entered: list[str] = field(default_factory=list)  # groups with new rows: they begin, or fan out
    copied: list[str] = field(default_factory=list)  # of `entered`: whose further rows are copies of the first
    new_tokens_unknown: list[str] = field(default_factory=list)  # of `entered`: newest tokens only the device knows
    left: list[str] = field(default_factory=list)  # further rows of groups that ended or were preempted
    forests: Mapping[str, DraftForest] = field(default_factory=dict)  # of the groups that speculate
    cannot_draft: bool = False  # because of this engine's attention
    narrow: Collection[str] = ()  # groups for whose rows few logits are computed, see `worker.select.narrow`
    masks: dict[str, torch.Tensor] = field(default_factory=dict)  # [rows, V / 32], of groups with a grammar, packed
    selected: list[SelectedCohort] = field(default_factory=list)  # decided on the device
    decided: dict[str, DecidedMessage] = field(default_factory=dict)  # decided on the host: by forests
    decided_at: Any = None
    # By group that runs with all its rows: by KV cache group, how many first tokens these share.
    num_shared: dict[str, list[int]] = field(default_factory=dict)
    gets_blocks: bool = False  # rows of some of these groups get further blocks

    @property
    def copies_tails(self) -> bool:
        """Whether blocks are copied before the forward pass, for groups that fan out."""
        return any(step.rows is not None for step in self.steps.values())

    @property
    def decoding(self) -> list[str]:
        """Groups that run with all their rows."""
        return [group_id for group_id, step in self.steps.items() if step.decodes]

    @property
    def selecting(self) -> list[str]:
        """Groups whose next beams are selected in this step."""
        return [group_id for group_id, step in self.steps.items() if step.selects]

    @property
    def speculating(self) -> list[str]:
        """Groups that may draft in this step."""
        return [group_id for group_id, step in self.steps.items() if step.budget is not None]

    @property
    def most_steps(self) -> int:
        """The most search steps that any group can take."""
        if not self.forests:
            return 1
        return 1 + max(forest_step.num_layers for forest_step in self.forests.values())

    def results(self, packed: Sequence[np.ndarray]) -> dict[str, DecidedMessage]:
        """Everything that was decided, by group. `packed`: copies of what is on the device."""
        decided = dict(self.decided)
        for selected, on_host in zip(self.selected, packed, strict=True):
            steps = zip(selected.group_ids, unpack_search_steps(on_host, selected.layout), strict=True)
            for group_id, step in steps:
                asked_in_vain = self.cannot_draft and self.steps[group_id].budget is not None
                decided[group_id] = DecidedMessage([step], CANNOT_DRAFT if asked_in_vain else NOT_DRAFTED)
        return decided
