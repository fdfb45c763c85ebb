"""Triton kernels of selection and reordering; for each there is a function in torch that it must equal.

Nothing here waits for the device, and what a kernel computes depends on no schedule: no float atomics, no
autotuning. So ranks of tensor parallelism agree. A kernel is compiled anew where the alignment of an argument changes:
tensors that are parts of packed ones, whose alignment changes with the batch, are left out of this.
"""

from __future__ import annotations

import torch


def run_on(device: torch.device) -> bool:
    """Whether kernels do the work on this device; elsewhere torch does."""
    return device.type == "cuda"
