"""Pipeline parallelism: the last stage selects, and the earlier ones let their rows continue the same histories.

vLLM's own broadcast sends them the tokens of the rows that were in the batch. This one sends parents, and the tokens of
beams that get their rows only in the next step. A stage receives in parallel with its forward passes, as in vLLM, and
carries out the result when the group's next step comes: until then nothing reads or writes the group's own data.
"""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.pp_utils import PPHandler

from vllm_trie.worker.kv.kv_moves import KVFork, kv_rows_of_groups
from vllm_trie.worker.rows.rows import BatchRows, GroupRows, NextBeams, Rows
from vllm_trie.worker.step_context import RunnerStepContext


class PipelineStages:
    """One stage of a pipeline, as it communicates with the others.

    Args:
        handler: vLLM's, whose streams and process group these broadcasts use, before vLLM's own of the same step.
        groups: Of the stage's runner; on earlier stages their newest tokens are updated.
        rows: Of the same runner.
        max_num_reqs: Slots of the same runner.
    """

    def __init__(self, handler: PPHandler, groups: dict[str, GroupRows], rows: Rows, max_num_reqs: int) -> None:
        self._handler = handler
        self._groups = groups
        self._rows = rows
        self._max_num_reqs = max_num_reqs

    def send(self, step: RunnerStepContext) -> None:
        """Broadcasts from the last stage, once it has selected: the parents and tokens of all next beams."""
        if not step.selecting:
            return
        beams_of: dict[str, torch.Tensor] = {}
        for selected in step.selected:
            num_beams = selected.layout.width
            beams_of |= dict(zip(selected.group_ids, selected.packed[:, : 2 * num_beams].unbind(), strict=True))
        beams = torch.cat([beams_of[group_id] for group_id in step.selecting])
        self._broadcast(beams)
        beams.record_stream(self._handler.broadcast_stream)

    def receive(self, step: RunnerStepContext, batch: InputBatch) -> None:
        """Receives on an earlier stage, after the forward pass, what `send` sends."""
        if not step.selecting:
            return
        rows = BatchRows(batch, self._max_num_reqs)
        sizes = [2 * self._groups[group_id].rules.width for group_id in step.selecting]
        with torch.cuda.stream(self._handler.broadcast_stream):
            beams = torch.empty(sum(sizes), dtype=torch.int32, device=self._rows.device)
        self._broadcast(beams)
        received = self._handler.broadcast_stream.record_event()
        beams.record_stream(self._handler.main_stream)
        for group_id, of_group in zip(step.selecting, torch.split(beams, sizes), strict=True):
            group = self._groups[group_id]
            (num_tokens,) = rows.num_tokens(rows.places(group.slots[:1])).tolist()
            parents, tokens = of_group.view(2, -1).unbind()
            group.next_beams = NextBeams(parents, tokens, num_tokens, step.steps[group_id].decodes, received)

    def continue_histories(self, step: RunnerStepContext) -> None:
        """Carries out, on an earlier stage and before a step, the last result of each group in it."""
        moved = list[tuple[GroupRows, NextBeams]]()
        for group_id in step.steps:
            group = self._groups[group_id]
            beams, group.next_beams = group.next_beams, None
            if beams is None:
                continue
            self._handler.main_stream.wait_event(beams.received)
            group.tokens = beams.tokens.long()
            if beams.have_rows and len(group.slots) > 1:
                moved.append((group, beams))
        if not moved:
            return
        rows = kv_rows_of_groups([group.slots[None] for group, _ in moved], [[len(group.prompt)] for group, _ in moved])
        num_tokens = np.repeat([beams.num_tokens for _, beams in moved], [len(group.slots) for group, _ in moved])
        # int64 as on the last stage, or the kernel would be recompiled.
        parents = [beams.parents.long() for _, beams in moved]
        self._rows.fork(KVFork.of(rows, num_tokens, parents, self._rows.device))

    def _broadcast(self, tensor: torch.Tensor) -> None:
        handler = self._handler
        with torch.cuda.stream(handler.broadcast_stream):
            handler.broadcast_stream.wait_stream(handler.main_stream)
            torch.distributed.broadcast(tensor, src=handler.last_rank, group=handler.broadcast_group)
