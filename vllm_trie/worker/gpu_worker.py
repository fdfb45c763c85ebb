"""vLLM's GPU worker around a runner with beam groups."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from vllm_trie.worker.runner import BeamModelRunner


class BeamGPUWorker(Worker):
    """Makes the runner with beam groups."""

    def _make_model_runner(self) -> BeamModelRunner:
        return BeamModelRunner(self.vllm_config, self.device)
