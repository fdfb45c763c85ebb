"""What vLLM's OffloadingConnector lacks on a CPU: something that copies blocks. It copies as late as it may.

vLLM's scheduler side, its bookkeeping of what is stored and when it must be, is the one that engines on GPUs have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

STEPS_TO_COPY = 20


def offloading_config(**options: Any) -> KVTransferConfig:
    """The configuration of an engine that has it."""
    extra = {"spec_name": "LateSpec", "spec_module_path": __name__, "cpu_bytes_to_use": 1 << 24, **options}
    return KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)


class LateSpec(CPUOffloadingSpec):
    """vLLM's own, but for the copies."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        return LateWorker([one.tensor for one in kv_caches.tensors], self.num_chunks)


class LateWorker(OffloadingWorker):
    """Copies when it is waited for, or some steps later."""

    def __init__(self, caches: list[torch.Tensor], num_chunks: int) -> None:
        self.caches = caches
        self.chunks = [torch.zeros(num_chunks, cache.shape[1], dtype=cache.dtype) for cache in caches]
        self.jobs: dict[int, tuple[int, Callable[[], None]]] = {}  # steps left, and what is to be done
        self.num_waited_for = self.num_copied = 0

    def _copy(self, source: list[torch.Tensor], places: Any, target: list[torch.Tensor], targets: Any) -> None:
        for from_one, to_one in zip(source, target, strict=True):
            to_one[torch.tensor(targets, dtype=torch.long)] = from_one[torch.tensor(places, dtype=torch.long)]
        self.num_copied += len(places)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        copy = partial(self._copy, self.caches, src_spec.block_ids, self.chunks, dst_spec.block_ids)
        self.jobs[job_id] = STEPS_TO_COPY, copy
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        copy = partial(self._copy, self.chunks, src_spec.block_ids, self.caches, dst_spec.block_ids)
        self.jobs[job_id] = STEPS_TO_COPY, copy
        return True

    def get_finished(self) -> list[TransferResult]:
        finished = []
        for job_id, (steps_left, copy) in list(self.jobs.items()):
            self.jobs[job_id] = steps_left - 1, copy
            if steps_left <= 0:
                copy()
                del self.jobs[job_id]
                finished.append(TransferResult(job_id, success=True, transfer_size=1, transfer_time=1.0))
        return finished

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self.jobs.keys():
            self.jobs[job_id][1]()
            self.jobs[job_id] = 0, lambda: None
            self.num_waited_for += 1
