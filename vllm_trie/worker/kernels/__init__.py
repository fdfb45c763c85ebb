"""Triton kernels of selection and reordering; each must equal a function in torch.

Nothing here waits for the device, and no result depends on scheduling: no float atomics, no autotuning. So ranks of
tensor parallelism agree. Triton recompiles a kernel where the alignment of an argument changes; tensors that are parts
of packed ones, whose alignment changes with the batch, are excluded from this specialization.

`warm_up_kernels` of a module launches its kernels, and those that these need of other modules, in all variants that
serving can launch; `worker.startup.warm_up` calls it.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch

from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.catalog import ConstraintAlongItems
from vllm_trie.search.step_result import PackedSearchStep

if TYPE_CHECKING:
    from vllm_trie.worker.kernels.tiles import KernelLogits


CHILDREN = 16, 256, 4096  # of a node: sizes that kernels looking at all children of a row are compiled for
SLOTS = 4, 16, 32, 64  # of a group: sizes that kernels are compiled for; more would spill the group's keys


class KernelStepSizes(NamedTuple):
    """The sizes of a step of groups with equal rules."""

    num_rows: int  # of each group
    vocab_size: int
    most_children: int = 0  # of any row's node, or an upper bound; 0: not along a catalog

    @staticmethod
    def of(beams: SearchBeams, vocab_size: int) -> KernelStepSizes:
        """From what the step's rows carry, and the vocabulary of their logits."""
        num_rows = beams.scores.shape[1]
        if not beams.states or (along := cast(ConstraintAlongItems | None, beams.sparse)) is None:
            return KernelStepSizes(num_rows, vocab_size)
        most = along.most_children(beams.length)
        if num_rows <= SLOTS[-1] and most <= CHILDREN[-1]:  # so that similar depths have the same plan
            most = CHILDREN[bisect_left(CHILDREN, most)]
        return KernelStepSizes(num_rows, vocab_size, most)


class TakeStep(Protocol):
    """Takes a step of groups with equal rules, as `search.step.take_packed_search_step` does."""

    def __call__(
        self, logits: KernelLogits, beams: SearchBeams, places: torch.Tensor, sampled: torch.Tensor
    ) -> PackedSearchStep:
        """Takes the step.

        Args:
            logits: Of all rows of G groups, group after group.
            beams: What the rows carry.
            places: [G * r] int64, the rows' indices in the batch.
            sampled: [batch, ...] int64, receives the newest token of every row.
        """


class KernelVariants(NamedTuple):
    """What determines the kernel variants that an engine launches."""

    tokens: torch.Tensor  # [slots, length] int32
    most_beams: int  # of a group
    logits: tuple[torch.Tensor, ...] = ()  # [N, V] each, of every type, stride and alignment that is selected from
    draft_logits: tuple[torch.Tensor, ...] = ()  # the same of a draft model

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def widths(self) -> list[int]:
        """The powers of two up to the first that is not below `most_beams`."""
        return [1 << exponent for exponent in range((self.most_beams - 1).bit_length() + 1)]
