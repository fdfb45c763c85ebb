"""Beam groups under async scheduling: the next step is scheduled before the last one's result is known."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_trie.engine.scheduler import BeamScheduler


class AsyncBeamScheduler(BeamScheduler, AsyncScheduler):
    """`BeamScheduler`, which counts the steps whose results are pending, on top of vLLM's `AsyncScheduler`.

    Neither needs the parents of a step to schedule the next one: every step makes each row one token longer,
    and new blocks are given to rows whatever history they continue. The worker forks its rows by itself, and the
    scheduler replays that on its tries one step late. vLLM counts the tokens of a request that are on their
    way as placeholders; for a group these are its pending steps. A group that speculates waits for its result,
    while all others go on: without placeholders it has nothing to compute.
    """

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        for group_id in self.groups:
            self._expect_pending_steps(self.requests[group_id])
        return output

    def _update_request_with_output(self, request: Request, *args: Any, **kwargs: Any) -> tuple[list[int], bool]:
        updated = super()._update_request_with_output(request, *args, **kwargs)
        if request.request_id in self.groups:
            self._expect_pending_steps(request)
        return updated

    def _expect_pending_steps(self, request: Request) -> None:
        group, is_running = self.groups[request.request_id], request.status == RequestStatus.RUNNING
        request.num_output_placeholders = group.num_pending if is_running and not group.waits else 0
