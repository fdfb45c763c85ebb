"""Which kernels take a step, if any do. Asked by `worker.select`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_trie.search.beams import Beams
from vllm_trie.search.rules import SelectRules
from vllm_trie.worker.kernels import best, items
from vllm_trie.worker.kernels.best import Taken
from vllm_trie.worker.kernels.tiles import RowLogits

TakeStep = Callable[[SelectRules, RowLogits, Beams, torch.Tensor, torch.Tensor], Taken]


def by_kernels(rules: SelectRules, beams: Beams, vocab_size: int) -> TakeStep | None:
    """What takes a step of groups by these rules; None: torch."""
    takes = (kernels.take_step for kernels in (best, items) if kernels.takes(rules, beams, vocab_size))
    return next(takes, None)
