"""vLLM's V2 model runner for CPUs, with beam groups."""

from __future__ import annotations

from vllm.v1.worker.cpu.model_runner import CPUModelRunner

from vllm_trie.worker.v2 import BeamModelRunnerV2


class BeamCPUModelRunnerV2(BeamModelRunnerV2, CPUModelRunner):
    """vLLM's CPU runner with beam groups."""
