"""What vLLM stores per slot for models with recurrent states: how many tokens each row took in."""

from __future__ import annotations

import numpy as np

from vllm_trie.worker.cpu.replace import Array, replaces_on_cpu


@replaces_on_cpu("model_states.mamba_hybrid:_scatter_num_accepted_kernel")
def scatter_num_accepted_on_cpu(idx_mapping: Array, num_sampled: Array, num_accepted: Array) -> None:
    """How many tokens each row took in, at least one; rows in slot -1 are left out."""
    real = idx_mapping >= 0
    num_accepted[idx_mapping[real]] = np.maximum(num_sampled[real], 1)


@replaces_on_cpu("model_states.mamba_hybrid:_fill_num_accepted_kernel")
def fill_num_accepted_on_cpu(idx_mapping: Array, num_accepted: Array, num_sampled: int) -> None:
    """Sets the same number for all rows; rows in slot -1 are left out."""
    num_accepted[idx_mapping[idx_mapping >= 0]] = num_sampled
