"""vLLM's CPU worker around the V1 runner with beam groups."""

from __future__ import annotations

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_trie.patching import Patch
from vllm_trie.worker.v1 import BeamModelRunner


class BeamCPUModelRunner(BeamModelRunner, CPUModelRunner):
    """vLLM's CPU runner with beam groups."""


class BeamCPUWorker(CPUWorker):
    """`CPUWorker` names its runner class inside `init_device`; there is no other seam."""

    def init_device(self) -> None:
        with Patch("vllm.v1.worker.cpu_worker", "CPUModelRunner").applied(BeamCPUModelRunner):
            super().init_device()
