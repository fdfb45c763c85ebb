"""Which kernels take a step, if any do. Asked by `worker.select.select`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_trie.search.beams import Beams
from vllm_trie.search.rules import SelectRules
from vllm_trie.worker.kernels import best, in_groups, items, wide, wide_catalog
from vllm_trie.worker.kernels.best import Taken
from vllm_trie.worker.kernels.tiles import RowLogits

TakeStep = Callable[[SelectRules, RowLogits, Beams, torch.Tensor, torch.Tensor], Taken]  # as `best.take_step`


def by_kernels(rules: SelectRules, beams: Beams, vocab_size: int) -> TakeStep | None:
    """What takes a step of groups by these rules; None: torch, as under each constraint but a catalog."""
    kinds = best, items, in_groups, wide, wide_catalog
    return next((kernels.take_step for kernels in kinds if kernels.takes(rules, beams, vocab_size)), None)
