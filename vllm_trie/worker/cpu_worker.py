"""vLLM's CPU worker around a runner with beam groups."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_trie.patching import Patch
from vllm_trie.worker.cpu.config import needs_cpu_kernels


class BeamCPUWorker(CPUWorker):
    """`CPUWorker` names its runner class inside `init_device`; there is no other seam."""

    def init_device(self) -> None:
        if needs_cpu_kernels():
            from vllm_trie.worker.cpu.kernels import install

            install()
        from vllm_trie.worker.v2_cpu import BeamCPUModelRunnerV2

        with Patch("vllm.v1.worker.cpu.model_runner", "CPUModelRunner").applied(BeamCPUModelRunnerV2):
            super().init_device()
