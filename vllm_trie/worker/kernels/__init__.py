"""Triton kernels of selection and reordering; for each there is a function in torch that it must equal.

Nothing here waits for the device, and what a kernel computes depends on no schedule: no float atomics, no
autotuning. So ranks of tensor parallelism agree. A kernel is compiled anew where the alignment of an argument changes:
tensors that are parts of packed ones, whose alignment changes with the batch, are left out of this.

Each module ends with `warm_up_kernels`, which launches all its kernels in all variants that serving can launch;
`worker.startup.warm_up` calls it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_trie.worker.kv.reorder import Tables


class KernelVariants(NamedTuple):
    """What the variants of kernels that an engine launches depend on."""

    tokens: torch.Tensor  # [slots, length] int32
    tables: Tables
    most_beams: int  # of a group
    logits: tuple[torch.Tensor, ...] = ()  # [N, V] each, of every type, stride and alignment that is selected from
    draft_logits: tuple[torch.Tensor, ...] = ()  # likewise, of a draft model

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def widths(self) -> list[int]:
        """The powers of two up to the first that is not below `most_beams`."""
        return [1 << exponent for exponent in range((self.most_beams - 1).bit_length() + 1)]
