"""The seam of speculation in the worker: all that its core knows of steps that take several steps of a search at once.

`vllm_trie.speculation.worker` has what fills it in, which engines without drafts do not load. The core calls it in this
order: `attach` once the model is loaded, `begin` once there is a KV cache; then in each step with groups that may draft
`propose`, `place` and, after the forward, `accept`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_trie.messages import DecidedMessage
from vllm_trie.worker.expand import RunnerStepContext
from vllm_trie.worker.rows.rows import BatchRows, GroupRows

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_trie.worker.kernels import KernelVariants


class RunnerSpeculation:
    """Drafts for the groups of a runner, and takes as many steps of their searches as the target verifies.

    This is that of an engine without drafts, which does nothing. The class that fills it in is made with the runner,
    whose model is not loaded yet.
    """

    takes_trees = False  # attention does, and there are drafts

    def attach(self) -> None:
        """The model is loaded, `runner.rows` and `runner.selector` are there."""

    def take_memory(self) -> None:
        """Take as much memory as steps will, while vLLM measures what is left for the KV cache."""

    def leave_room(self, num_bytes: int) -> int:
        """Of so many bytes for the KV cache those that are left beside what drafts need for each block."""
        return num_bytes

    def begin(self) -> None:
        """There is a KV cache."""

    def warm_up(self, serving: KernelVariants) -> None:
        """Launch all kernels of its own, as those of the core are launched."""

    def warm_up_stock(self) -> None:
        """Launch those of vLLM's kernels that drafts launch in other variants than vLLM's own warm-up."""

    def propose(self, step: RunnerStepContext, groups: dict[str, GroupRows], output: SchedulerOutput) -> None:
        """Draft for groups with a budget, before the forward: `step.forests`, and in `output` what rows compute.

        Where it cannot, `step.cannot_draft`.
        """

    def in_place(self) -> AbstractContextManager[None]:
        """Within it vLLM finds the drafts of the step's forests where it looks for its own."""
        return nullcontext()

    def place(self, batch: InputBatch, slot_mappings: torch.Tensor) -> None:
        """Put the nodes of the step's forests where they follow their parents, in the positions [T] of the batch.

        Of forests that the device has grown, put their tokens and KV slots in place, too.

        Args:
            batch: Its `input_ids` and `positions` are written.
            slot_mappings: [KV cache groups, T or more] int64, written.
        """

    def keep(self, forward: Any) -> None:
        """Keep what drafts need of a forward; `forward` is vLLM's `ExecuteModelState`."""

    def accept(
        self, rows: BatchRows, logits: torch.Tensor, sampled: torch.Tensor, num_sampled: np.ndarray
    ) -> dict[str, DecidedMessage]:
        """Take as many steps as the step's forests hold. Waits for the device.

        Args:
            rows: Of the batch.
            logits: [N, V] of all nodes among others, unprocessed.
            sampled: [R, steps] int64, receives the new tokens of every beam's row.
            num_sampled: [2, R or more], receives how many these are, and how many tokens each row computed for nothing.

        Returns:
            What was decided, by group.
        """
        return {}


class WorkerLeavesRoom:
    """A worker that leaves room for what drafts need beside vLLM's KV cache."""

    model_runner: Any

    def determine_available_memory(self) -> int:
        """Bytes for vLLM's KV cache."""
        available: int = super().determine_available_memory()  # type: ignore[misc]
        return int(self.model_runner.speculation.leave_room(int(available)))
