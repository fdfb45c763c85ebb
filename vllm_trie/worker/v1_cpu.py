"""vLLM's V1 model runner for CPUs, with beam groups."""

from __future__ import annotations

from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_trie.worker.v1 import BeamModelRunner


class BeamCPUModelRunner(BeamModelRunner, CPUModelRunner):
    """vLLM's CPU runner with beam groups."""
