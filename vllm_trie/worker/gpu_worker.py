"""vLLM's GPU worker with a runner for beam groups."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from vllm_trie.supported_engines import plugin_config_of
from vllm_trie.worker.rows.catalogs import TakesRowCatalogs
from vllm_trie.worker.runner import BeamModelRunner
from vllm_trie.worker.speculation import WorkerLeavesRoom
from vllm_trie.worker.startup.warm_up import WarmsUpAtStartup


class BeamGPUWorker(TakesRowCatalogs, WorkerLeavesRoom, WarmsUpAtStartup, Worker):
    """A GPU worker with `BeamModelRunner`."""

    def _make_model_runner(self) -> BeamModelRunner:
        if plugin_config_of(self.vllm_config).shared_prefix_attention != "off":
            from vllm_trie.worker.attention.gpu_backend import use_gpu_attention_backend

            use_gpu_attention_backend()
        return BeamModelRunner(self.vllm_config, self.device)
