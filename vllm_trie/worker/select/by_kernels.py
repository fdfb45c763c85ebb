"""Takes a step by kernels where they can. Imported by `worker.select.select` on devices that have kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.rules import SearchInputs, SearchRules
from vllm_trie.search.step import take_packed_search_step
from vllm_trie.search.step_result import PackedSearchStep, SearchResultLayout
from vllm_trie.worker.kernels import KernelStepSizes, TakeStep, in_groups, step
from vllm_trie.worker.kernels.slots import launch_select_next
from vllm_trie.worker.kernels.tiles import KernelLogits
from vllm_trie.worker.select.cohort import SelectionCohort, put_newest_selected

NO_VALUES = torch.empty(0, 0)  # a plan has no logits of a step


@lru_cache(maxsize=64)
def select_by_kernels(rules: SearchRules, sizes: KernelStepSizes) -> TakeStep | None:
    """The kernels for a step of groups with these rules, planned once; None: torch, as for most constraints."""
    kinds = (step, step.KernelStep), (in_groups, in_groups.KernelStepInGroups)
    return next((kind(rules, sizes) for module, kind in kinds if module.can_take_by_kernels(rules, sizes)), None)


def planned_selection(
    cohort: SelectionCohort, values: torch.Tensor, beams: SearchBeams, level: torch.Tensor | None
) -> tuple[KernelLogits, TakeStep | None]:
    """The logits of a cohort's rows among `values` [N, V], and the kernels for its step, if any; planned once.

    Args:
        beams: What its rows carry.
        level: The tokens that these logits are for, see `SearchInputs`.
    """
    sizes = KernelStepSizes.of(beams, values.shape[1])
    if (plan := cohort.plans.get(sizes)) is None:
        logits = KernelLogits.of(values, cohort.on_device[0], cohort.rules.stops)
        plan = cohort.plans[sizes] = logits._replace(values=NO_VALUES), select_by_kernels(cohort.rules, sizes)
    return plan[0]._replace(values=values, level=level), plan[1]


@dataclass(frozen=True)
class SelectionStepByTorch(TakeStep):
    """Takes a step by torch, where a kernel finds the slots of the next beams.

    Args:
        rules: The step's rules.
        inputs: Its other inputs.
        which: Indices of the rows' logits among all.
        layout: How it is packed.
    """

    rules: SearchRules
    inputs: SearchInputs
    which: slice | torch.Tensor
    layout: SearchResultLayout

    def __call__(
        self, logits: KernelLogits, beams: SearchBeams, places: torch.Tensor, sampled: torch.Tensor
    ) -> PackedSearchStep:
        """See `TakeStep`."""
        of_rows = logits.values[self.which].view(*beams.scores.shape, -1)
        inputs = self.inputs._replace(select_next=launch_select_next)
        taken = take_packed_search_step(self.rules, of_rows, beams, inputs, self.layout)
        put_newest_selected(taken.going, places, sampled)
        return taken
