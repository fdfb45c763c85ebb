"""vLLM's GPU worker around a runner with beam groups."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker


class BeamGPUWorker(Worker):
    """Makes the runner with beam groups of the version that vLLM would run."""

    def _make_model_runner(self) -> Any:
        if self.use_v2_model_runner:
            from vllm_trie.worker.v2 import BeamModelRunnerV2

            return BeamModelRunnerV2(self.vllm_config, self.device)
        from vllm_trie.worker.v1 import BeamModelRunner

        return BeamModelRunner(self.vllm_config, self.device)
