"""vLLM's engine step while searches wait for results: it does not sleep.

With async scheduling, a search that `waits` leaves nothing to schedule until its result is in. vLLM schedules an empty
step then, takes that result, and sleeps 1 ms as it has scheduled nothing. The search could go on at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.engine.core import DPEngineCoreProc, EngineCore

from vllm_trie.compat.patch import wraps_vllm
from vllm_trie.supported_engines import has_beams


@wraps_vllm("step_with_batch_queue", "vllm.v1.engine.core:EngineCore")
def engine_step_with_groups(
    original: Callable[..., tuple[Any, bool]], self: EngineCore, *args: Any, **kwargs: Any
) -> tuple[Any, bool]:
    """Report that the model was executed also if the step took such a result, so that vLLM does not sleep after it.

    With data parallelism, engines must report what they have scheduled: the others compute as many steps. Engines
    without beams in the same process are as before.
    """
    oldest = self.batch_queue[-1][1] if self.batch_queue else None
    outputs, is_executed = original(self, *args, **kwargs)
    if is_executed or outputs is None or oldest is None or not oldest.total_num_scheduled_tokens:
        return outputs, is_executed
    if not self.async_scheduling or isinstance(self, DPEngineCoreProc) or not has_beams(self.vllm_config):
        return outputs, is_executed
    return outputs, bool(self.scheduler.groups)
