"""What the worker knows of beam groups, and the one object that a step hands from hook to hook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_trie.messages import Decided, GroupStep

if TYPE_CHECKING:
    from vllm_trie.worker.draft import ForestStep
    from vllm_trie.worker.select import Selected


@dataclass(slots=True)
class GroupRows:
    """The rows of one group, each a request with a slot of its own to vLLM's runner."""

    request: NewRequestData  # as vLLM sent it
    row_ids: list[str]
    scores: torch.Tensor  # [rows] float32 on the device, cumulative log-probability
    tokens: torch.Tensor  # [rows of the next step] int64 on the device, newest token of each beam
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [rows], once the runner has them
    num_drafted: int = 0  # tokens of each row that the draft model has computed, if there is one

    @property
    def prompt(self) -> list[int]:
        return self.request.prompt_token_ids or []


@dataclass(slots=True)
class StepContext:
    """One step of the engine, from `execute_model` to `sample_tokens`: all that one hook leaves to another.

    `decided_at` is the moment in the device's stream at which all is decided.
    """

    steps: dict[str, GroupStep] = field(default_factory=dict)  # of the groups in it, by id
    entered: list[str] = field(default_factory=list)  # groups that have new rows: they begin, or fan out
    new_tokens_unknown: list[str] = field(default_factory=list)  # of those: whose newest tokens the device alone knows
    forests: dict[str, ForestStep] = field(default_factory=dict)  # of the groups that speculate
    selected: list[Selected] = field(default_factory=list)  # what was decided, on the device
    decided: dict[str, Decided] = field(default_factory=dict)  # what was decided on the host: of the forests
    decided_at: Any = field(default_factory=lambda: torch.cuda.Event())  # type: ignore[no-untyped-call]

    @property
    def selecting(self) -> list[str]:
        """Groups that have reached the end of what is known, and search."""
        return [group_id for group_id, step in self.steps.items() if step.selects]

    @property
    def decoding(self) -> list[str]:
        """Groups that run with all their rows."""
        return [group_id for group_id, step in self.steps.items() if step.decodes]

    @property
    def speculating(self) -> list[str]:
        """Groups that may draft in this step."""
        return [group_id for group_id, step in self.steps.items() if step.grant is not None]

    @property
    def most_steps(self) -> int:
        """Steps of the search that any group can take."""
        return max((1 + forest_step.num_layers for forest_step in self.forests.values()), default=1)

    def results(self, packed: Sequence[np.ndarray]) -> dict[str, Decided]:
        """All that was decided, by group. `packed`: copies of what is on the device."""
        decided = dict(self.decided)
        for selected, on_host in zip(self.selected, packed, strict=True):
            decided |= selected.decided(on_host)
        return decided


class BatchRows:
    """Where the rows of groups are in the present batch.

    Args:
        batch: vLLM's.
        max_num_reqs: Slots of the runner.
    """

    def __init__(self, batch: InputBatch, max_num_reqs: int) -> None:
        self.batch = batch
        self._place_of_slot = np.full(max_num_reqs, -1)
        self._place_of_slot[batch.idx_mapping_np] = np.arange(batch.num_reqs)

    def places(self, slots: np.ndarray) -> np.ndarray:
        """Of any shape: where the rows in these slots are."""
        return self._place_of_slot[slots]

    def num_tokens(self, places: np.ndarray) -> np.ndarray:
        """Of any shape: how many tokens these rows hold, this step's included."""
        return self.batch.seq_lens_cpu_upper_bound.numpy()[places]

    def first_logits(self, places: np.ndarray) -> np.ndarray:
        """Of any shape: where the logits of these rows begin."""
        return self.batch.cu_num_logits_np[places]

    def num_logits(self, places: np.ndarray) -> np.ndarray:
        """Of any shape: how many logits these rows have."""
        return np.diff(self.batch.cu_num_logits_np)[places]
