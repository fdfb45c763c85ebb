"""Functions in the place of kernels get the arguments that they name, or say which there is not."""

from __future__ import annotations

import pytest
import torch

from vllm_trie.worker.cpu.replace import Array, Launch

pytestmark = pytest.mark.slow


def _kernel(logits_ptr, logits_stride, lengths_ptr, BLOCK_SIZE, MASK_STRIDE):  # type: ignore[no-untyped-def]  # noqa: N803
    """What Triton would compile."""


def test_arguments_come_by_the_names_of_the_kernel() -> None:
    def double(lengths: Array, logits: torch.Tensor, mask_stride: int, drafts: Array | None = None) -> None:
        lengths *= mask_stride
        logits.add_(1)
        assert drafts is None  # which this version's kernel lacks

    logits, lengths = torch.zeros(2, 3), torch.tensor([1, 2])
    Launch(_kernel, double)[(2,)](logits, 3, lengths, BLOCK_SIZE=8, MASK_STRIDE=4)
    assert logits.tolist() == [[1.0] * 3] * 2
    assert lengths.tolist() == [4, 8]


def test_an_argument_that_the_kernel_does_not_have_is_named() -> None:
    def read(logits: Array, temperature: Array) -> None: ...

    with pytest.raises(TypeError, match="_kernel has no argument temperature, which read takes"):
        Launch(_kernel, read)
