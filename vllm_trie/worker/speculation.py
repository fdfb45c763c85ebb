"""The seam of speculation in the worker: all that the core knows of steps that take several search steps at once.

`vllm_trie.speculation.worker` implements it; engines without drafts do not import that. The core calls in this order:
`attach` once the model is loaded, `begin` once there is a KV cache; then in each step with groups that may draft
`propose`, `place` and, after the forward pass, `accept`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_trie.messages import DecidedMessage
from vllm_trie.worker.rows.rows import BatchRows, GroupRows
from vllm_trie.worker.step_context import RunnerStepContext

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_trie.worker.kernels import KernelVariants


class RunnerSpeculation:
    """Drafts for the groups of a runner, and takes as many steps of their searches as the target verifies.

    This class is for engines without drafts, and does nothing. An implementation is made with the runner, whose model
    is not loaded yet.
    """

    takes_trees = False  # attention supports draft trees, and there are drafts

    def attach(self) -> None:
        """Called when the model is loaded, and `runner.rows` and `runner.selector` exist."""

    def take_memory(self) -> None:
        """Allocates as much memory as steps will take, while vLLM measures what is left for the KV cache."""

    def leave_room(self, num_bytes: int) -> int:
        """The share of `num_bytes` for the KV cache that is left after what drafts need for each block."""
        return num_bytes

    def begin(self) -> None:
        """Called when there is a KV cache."""

    def warm_up(self, serving: KernelVariants) -> None:
        """Launches all of its kernels, as the core's are launched."""

    def warm_up_stock(self) -> None:
        """Launches vLLM's kernels in the variants that drafts need and vLLM's own warm-up leaves out."""

    def propose(self, step: RunnerStepContext, groups: dict[str, GroupRows], output: SchedulerOutput) -> None:
        """Drafts for groups with a budget, before the forward pass: sets `step.forests`, and `output` of their rows.

        Sets `step.cannot_draft` if it cannot.
        """

    def in_place(self) -> AbstractContextManager[None]:
        """A context in which vLLM finds the drafts of the step's forests where it looks for its own."""
        return nullcontext()

    def place(self, batch: InputBatch, slot_mappings: torch.Tensor) -> None:
        """Writes the positions [T] of the batch's draft nodes, which follow their parents.

        Of forests that the device has grown, also writes tokens and KV slots.

        Args:
            batch: Writes its `input_ids` and `positions`.
            slot_mappings: [KV cache groups, T or more] int64, written.
        """

    def keep(self, forward: Any) -> None:
        """Stores what drafts need of a forward pass; `forward` is vLLM's `ExecuteModelState`."""

    def accept(
        self, rows: BatchRows, logits: torch.Tensor, sampled: torch.Tensor, num_sampled: np.ndarray
    ) -> dict[str, DecidedMessage]:
        """Takes as many steps as the step's forests allow. Waits for the device.

        Args:
            rows: The batch's.
            logits: [N, V], unprocessed, including those of all nodes.
            sampled: [R, steps] int64, receives the new tokens of every beam's row.
            num_sampled: [2, R or more], receives how many these are, and how many of each row's tokens are rejected.

        Returns:
            What was decided, by group.
        """
        return {}


class WorkerLeavesRoom:
    """A worker that leaves room for what drafts need besides vLLM's KV cache."""

    model_runner: Any

    def determine_available_memory(self) -> int:
        """Bytes for vLLM's KV cache."""
        available: int = super().determine_available_memory()  # type: ignore[misc]
        return int(self.model_runner.speculation.leave_room(int(available)))
