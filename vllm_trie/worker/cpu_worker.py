"""vLLM's CPU worker around a runner with beam groups."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_trie.patching import Patch


class BeamCPUWorker(CPUWorker):
    """`CPUWorker` names its runner class inside `init_device`; there is no other seam."""

    def init_device(self) -> None:
        if self.use_v2_model_runner:
            from vllm_trie.worker.v2_cpu import BeamCPUModelRunnerV2

            runner, where = BeamCPUModelRunnerV2, "vllm.v1.worker.cpu.model_runner"
        else:
            from vllm_trie.worker.v1_cpu import BeamCPUModelRunner

            runner, where = BeamCPUModelRunner, "vllm.v1.worker.cpu_worker"
        with Patch(where, "CPUModelRunner").applied(runner):
            super().init_device()
