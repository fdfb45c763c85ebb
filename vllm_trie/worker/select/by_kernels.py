"""A step by kernels where they can take it. Loaded by `worker.select.select` on devices that have kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_trie.search.beams import Beams
from vllm_trie.search.rules import Means, SelectRules
from vllm_trie.search.step import take_step
from vllm_trie.search.step_result import Going, Taken, packed
from vllm_trie.worker.kernels import best, in_groups, items, wide, wide_catalog
from vllm_trie.worker.kernels.tiles import KernelLogits

TakeStep = Callable[
    [SelectRules, KernelLogits, Beams, torch.Tensor, torch.Tensor], Taken
]  # as `best.take_step_by_kernels`


def select_by_kernels(rules: SelectRules, beams: Beams, vocab_size: int) -> TakeStep | None:
    """What takes a step of groups by these rules; None: torch, as under each constraint but a catalog."""
    kinds = best, items, in_groups, wide, wide_catalog
    return next(
        (kernels.take_step_by_kernels for kernels in kinds if kernels.can_take_by_kernels(rules, beams, vocab_size)),
        None,
    )


@dataclass(frozen=True)
class TakeRows:
    """Takes a step by kernels where they can, else by torch; called as `TakeStep`."""

    means: Means
    which: slice | torch.Tensor  # those of the rows among all logits, where torch takes it

    def __call__(
        self, rules: SelectRules, logits: KernelLogits, beams: Beams, places: torch.Tensor, sampled: torch.Tensor
    ) -> Taken:
        if take := select_by_kernels(rules, beams, logits.values.shape[1]):
            return take(rules, logits, beams, places, sampled)
        step = take_step(rules, logits.values[self.which].view(*beams.scores.shape, -1), beams, self.means)
        sampled[:, 0].index_copy_(0, places, newest_selected_tokens(Going.of(step), beams))
        return Taken(Going.of(step), *packed(step))


def newest_selected_tokens(going: Going, beams: Beams) -> torch.Tensor:
    """[G * r] int64, the newest tokens of as many beams as there were rows."""
    return going.tokens[:, : beams.scores.shape[1]].long().flatten()
