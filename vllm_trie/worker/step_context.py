"""The one object that a step hands from hook to hook."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from vllm_trie.messages import CANNOT_DRAFT, NOT_DRAFTED, DecidedMessage, GroupStep
from vllm_trie.search.step_result import SearchResultLayout, unpack_search_steps
from vllm_trie.worker.attention.shared_rows import RowTrees
from vllm_trie.worker.rows.group_rows import BatchRows


class DraftForest(Protocol):
    """What one group has drafted for one step: a tree in the row of each beam."""

    @property
    def num_layers(self) -> int:
        """Steps of its search that it may take beside the first."""

    def trees(self, rows: BatchRows) -> RowTrees:
        """The trees in the batch of these rows, of which attention is told."""


class PackedStep(NamedTuple):
    """What a step of groups with equal rules decided, on the device."""

    group_ids: list[str]
    packed: torch.Tensor  # [G, n] int32
    layout: SearchResultLayout


@dataclass(slots=True)
class RunnerStepContext:
    """One step of the engine, from `execute_model` to `sample_tokens`: all that one hook leaves to another.

    `decided_at` is the moment in the device's stream at which all is decided.
    """

    steps: dict[str, GroupStep] = field(default_factory=dict)  # of the groups in it, by id
    entered: list[str] = field(default_factory=list)  # groups that have new rows: they begin, or fan out
    copied: list[str] = field(default_factory=list)  # of those: whose further rows are copies of the first
    new_tokens_unknown: list[str] = field(default_factory=list)  # of those: whose newest tokens the device alone knows
    forests: Mapping[str, DraftForest] = field(default_factory=dict)  # of the groups that speculate
    cannot_draft: bool = False  # by this engine's attention
    narrow: Collection[str] = ()  # groups of whose rows few logits are computed, see `worker.select.narrow`
    masks: dict[str, torch.Tensor] = field(default_factory=dict)  # [rows, V / 32] of groups with a grammar, packed
    selected: list[PackedStep] = field(default_factory=list)  # what was decided, on the device
    decided: dict[str, DecidedMessage] = field(default_factory=dict)  # what was decided on the host: of the forests
    decided_at: Any = field(default_factory=lambda: torch.cuda.Event())  # type: ignore[no-untyped-call]

    @property
    def num_shared(self) -> dict[str, list[int]]:
        """Of groups that run with all their rows: by KV cache group how many first tokens these share."""
        return {key: step.num_shared for key, step in self.steps.items() if step.decodes and step.num_shared}

    @property
    def decoding(self) -> list[str]:
        """Groups that run with all their rows."""
        return [group_id for group_id, step in self.steps.items() if step.decodes]

    @property
    def selecting(self) -> list[str]:
        """Groups whose next beams are selected in it."""
        return [group_id for group_id, step in self.steps.items() if step.selects]

    @property
    def speculating(self) -> list[str]:
        """Groups that may draft in this step."""
        return [group_id for group_id, step in self.steps.items() if step.budget is not None]

    @property
    def most_steps(self) -> int:
        """Steps of the search that any group can take."""
        if not self.forests:
            return 1
        return 1 + max(forest_step.num_layers for forest_step in self.forests.values())

    def results(self, packed: Sequence[np.ndarray]) -> dict[str, DecidedMessage]:
        """All that was decided, by group. `packed`: copies of what is on the device."""
        decided = dict(self.decided)
        for selected, on_host in zip(self.selected, packed, strict=True):
            steps = zip(selected.group_ids, unpack_search_steps(on_host, selected.layout), strict=True)
            for group_id, step in steps:
                asked_in_vain = self.cannot_draft and self.steps[group_id].budget is not None
                decided[group_id] = DecidedMessage([step], CANNOT_DRAFT if asked_in_vain else NOT_DRAFTED)
        return decided
