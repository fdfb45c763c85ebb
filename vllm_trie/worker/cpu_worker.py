"""vLLM's CPU worker with a runner for beam groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.cpu_worker import CPUWorker  # patches torch for a CPU, so it comes first

from vllm.v1.worker.cpu.model_runner import CPUModelRunner  # isort: skip

from vllm_trie.compat.cpu import accept_vllm_v2_runner, vllm_needs_cpu_kernels
from vllm_trie.compat.patch import VLLMPatch
from vllm_trie.speculative_config import has_states_by_config
from vllm_trie.worker.attention.cpu_backend import use_cpu_attention_backend
from vllm_trie.worker.rows.catalogs import TakesRowCatalogs
from vllm_trie.worker.runner import BeamModelRunner
from vllm_trie.worker.speculation import WorkerLeavesRoom

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class BeamCPUModelRunner(BeamModelRunner, CPUModelRunner):
    """vLLM's CPU runner for beam groups."""


class BeamCPUWorker(TakesRowCatalogs, WorkerLeavesRoom, CPUWorker):
    """A CPU worker with `BeamCPUModelRunner`. `CPUWorker.init_device` names its runner class: the only seam."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        self._config = vllm_config
        with accept_vllm_v2_runner():
            super().__init__(vllm_config, *args, **kwargs)

    def init_device(self, **kwargs: Any) -> None:
        if vllm_needs_cpu_kernels():
            from vllm_trie.worker.cpu.replace import install_replacements_on_cpu

            config = self._config
            has = {"drafts": config.speculative_config is not None, "states": has_states_by_config(config.model_config)}
            install_replacements_on_cpu(*(kind for kind, is_there in has.items() if is_there))
        use_cpu_attention_backend()
        with VLLMPatch("vllm.v1.worker.cpu.model_runner", "CPUModelRunner").applied(BeamCPUModelRunner):
            super().init_device(**kwargs)
