"""What selection knows of a batch before there are logits: made once, and cached until groups or rows change.

From step to step of a search little but scores changes: groups select by the same rules, and their rows stay where they
are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm_trie.search.beams import NextSearchBeams
from vllm_trie.search.devices import uploaded_for_search, uploaded_once_for_search
from vllm_trie.search.rules import SearchRules
from vllm_trie.search.step_result import SearchResultLayout
from vllm_trie.worker.kv.kv_moves import kv_rows_of_groups

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_trie.worker.kernels import KernelStepSizes, TakeStep
    from vllm_trie.worker.kernels.tiles import KernelLogits
    from vllm_trie.worker.rows.rows import BatchRows, GroupRows


class GroupInStep(NamedTuple):
    """What a group does in a step."""

    group: GroupRows
    rules: SearchRules
    decodes: bool
    selects: bool
    is_plain: bool  # it takes one step of its search, without drafts
    has_masks: bool  # a grammar bounds what its rows may take
    narrows: bool  # only the logits of a catalog's level are computed for its rows


class MovingRows(NamedTuple):
    """R rows that may continue others after a step."""

    rows: np.ndarray  # [3, R] int64, see `kv_rows_of_groups`
    places: np.ndarray  # [R] int64, indices in the batch

    @classmethod
    def of(cls, cohorts: Sequence[SelectionCohort]) -> MovingRows:
        """All rows of some cohorts."""
        prompts = [cohort.num_prompt for cohort in cohorts]
        places = [np.zeros(0, np.int64), *(cohort.places.ravel() for cohort in cohorts)]
        return cls(kv_rows_of_groups([cohort.slots for cohort in cohorts], prompts), np.concatenate(places))


@dataclass(eq=False)
class SelectionCohort:
    """G groups with equal rules that select together.

    Args:
        group_ids: Ids of the groups.
        rules: How they select.
        moves: Rows may continue others afterwards; after the last step none does.
        has_masks: A grammar bounds what rows may take.
        groups: Their rows.
        slots: [G, r], of the rows.
        places: [G, r], indices of the rows in the batch.
        narrows: Only the logits of a catalog's level are computed for the rows, separately from all others.
        index: [G, r], indices of the rows' logits among the batch's, if all are computed.
        device: Of the logits.
        among: [G, r], indices of the rows' logits among those computed for all tokens or, if the cohort narrows,
            among its own.
        plans: By the sizes of a step, once kernels have been asked for: their `KernelLogits` without values, and what
            takes the step; None where torch does.
    """

    group_ids: list[str]
    rules: SearchRules
    moves: bool
    has_masks: bool
    narrows: bool
    groups: list[GroupRows]
    slots: np.ndarray
    places: np.ndarray
    index: np.ndarray
    device: torch.device
    among: np.ndarray
    plans: dict[KernelStepSizes, tuple[KernelLogits, TakeStep | None]] = field(default_factory=dict)
    _layout: SearchResultLayout | None = None

    def layout(self, vocab_size: int) -> SearchResultLayout:
        """How a step is packed by the rules; a model has one vocabulary."""
        if self._layout is None:
            self._layout = self.rules.layout(self.places.shape[1], vocab_size)
        return self._layout

    @cached_property
    def which(self) -> slice | torch.Tensor:
        """`among`, as an index on the device."""
        return selection_index_of(self.among.ravel(), self.device)

    @cached_property
    def of_hidden_states(self) -> slice | torch.Tensor:
        """`index`, as an index on the device: there is a hidden state for each of the logits, if all are computed."""
        return selection_index_of(self.index.ravel(), self.device)

    @cached_property
    def num_prompt(self) -> np.ndarray:
        """[G], tokens of each group's prompt."""
        return np.array([len(group.prompt) for group in self.groups])

    def common_length(self, num_tokens: np.ndarray) -> int | None:
        """Tokens of every hypothesis, if all are equally long; `num_tokens` [G], of each row of a group."""
        lengths = num_tokens - self.num_prompt
        return int(lengths[0]) if (lengths == lengths[0]).all() else None

    @property
    def seen(self) -> np.ndarray:
        """[G * r], indices of the rows' logits among those that selection sees."""
        return np.arange(self.index.size) if self.rules.is_controlled else self.among.ravel()

    @cached_property
    def on_device(self) -> torch.Tensor:
        """[2, G * r] int64: `seen` and `places`."""
        return uploaded_for_search(np.stack([self.seen, self.places.ravel()]), self.device)


class CohortLogits(NamedTuple):
    """The logits for a step of a cohort."""

    cohort: SelectionCohort
    values: torch.Tensor  # [N, V], the rows' among others, see `SelectionCohort.seen`
    level: torch.Tensor | None = None  # [V] int64, see `SearchInputs`


class SelectionBatchPlan:
    """What is known of one batch, and of later ones that `fit`.

    Args:
        in_step: Its groups, by id.
        rows: The batch's rows.
        parts: Splits groups with these rules into those that may take a step together.
        device: Of logits.
    """

    def __init__(
        self,
        in_step: Mapping[str, GroupInStep],
        rows: BatchRows,
        parts: Callable[[SearchRules, list[str]], list[list[str]]],
        device: torch.device,
    ) -> None:
        batch = rows.batch
        self._in_step, self.rows, self._device = in_step, rows, device
        self._layout = batch.idx_mapping_np.copy(), batch.cu_num_logits_np.copy()
        alike = defaultdict[tuple[SearchRules, bool, bool, int | None], list[str]](list)
        for group_id, what in in_step.items():
            if what.is_plain:
                length = self._length(what.group) if what.narrows else None  # groups at one level stay at one level
                alike[what.rules, what.decodes, what.has_masks, length].append(group_id)
        self.cohorts = list[SelectionCohort]()
        for (rules, *_, length), group_ids in alike.items():
            # Few tokens take little memory, whatever else rules ask for.
            together = [group_ids] if length is not None else parts(rules, group_ids)
            self.cohorts.extend(map(self._cohort, together))
        self._narrow()
        self.is_controlled = any(cohort.rules.is_controlled for cohort in self.cohorts)
        self.contrasts = any(what.rules.contrasts for what in in_step.values())
        self.waits = any(what.rules.stops.strings for what in in_step.values())  # for the device, to find stop strings
        is_ordinary = np.ones(batch.num_reqs, dtype=bool)
        # And how many of a row's tokens are rejected; both aligned, or vLLM's kernels would be recompiled.
        self.num_sampled = np.zeros((2, -(-batch.num_reqs // 4) * 4), dtype=np.int32)
        for what in in_step.values():
            places = rows.places(what.group.slots)
            is_ordinary[places], self.num_sampled[0, places] = False, what.selects
        self.ordinary = is_ordinary.nonzero()[0]  # indices of rows of no group
        self.moving = MovingRows.of([cohort for cohort in self.cohorts if cohort.moves])

    @cached_property
    def counts(self) -> torch.Tensor:
        """`num_sampled` on the device. Read-only."""
        return uploaded_for_search(self.num_sampled, self._device)

    def fits(self, in_step: Mapping[str, GroupInStep], batch: InputBatch) -> bool:
        """Whether the same rows are at the same places of another batch, and do the same."""
        slots, logits = self._layout
        return (
            self._in_step == in_step
            and np.array_equal(slots, batch.idx_mapping_np)
            and np.array_equal(logits, batch.cu_num_logits_np)
        )

    def _narrow(self) -> None:
        """Finds the rows whose logits are all computed: `whole` [N'], of all N; and `among` [N], their new indices."""
        self.narrow, is_whole = [own for own in self.cohorts if own.narrows], np.ones(self._layout[1][-1], dtype=bool)
        for cohort in self.narrow:
            is_whole[cohort.index] = False
            cohort.among = np.arange(cohort.index.size).reshape(cohort.index.shape)
        self.whole, self.among = is_whole.nonzero()[0], is_whole.cumsum() - 1
        for cohort in self.cohorts if self.narrow else ():
            if not cohort.narrows:
                cohort.among = self.among[cohort.index]

    @cached_property
    def among_on_device(self) -> torch.Tensor:
        """[N] int64, `among`."""
        return uploaded_for_search(self.among, self._device)

    def length(self, cohort: SelectionCohort) -> int:
        """Tokens of each hypothesis of a cohort that narrows."""
        (length,) = {self._length(group) for group in cohort.groups}  # else logits would be read as another level's
        return length

    def _length(self, group: GroupRows) -> int:
        return int(self.rows.num_tokens(self.rows.places(group.slots[:1]))[0]) - len(group.prompt)

    def _cohort(self, group_ids: list[str]) -> SelectionCohort:
        groups = [self._in_step[group_id].group for group_id in group_ids]
        slots = np.array([group.slots for group in groups])
        places = self.rows.places(slots)
        what = self._in_step[group_ids[0]]
        moves = what.decodes and places.shape[1] > 1 and not what.rules.is_last
        index = self.rows.first_logits(places)
        of_rows = what.has_masks, what.narrows, groups, slots, places, index, self._device
        return SelectionCohort(group_ids, what.rules, moves, *of_rows, among=index)


def selection_index_of(index: np.ndarray, device: torch.device) -> slice | torch.Tensor:
    """[N] as an index on a device; consecutive numbers become a slice."""
    first, count = int(index[0]), len(index)
    if index.tolist() == [*range(first, first + count)]:
        return slice(first, first + count)
    return uploaded_once_for_search(index, device)


def put_newest_selected(going: NextSearchBeams, places: torch.Tensor, sampled: torch.Tensor) -> None:
    """Writes the newest tokens of the rows at `places` [G * r], of as many beams, into `sampled` [batch, ...]."""
    newest = going.tokens[:, : len(places) // len(going.tokens)].long().flatten()
    sampled[:, 0].index_copy_(0, places, newest)
