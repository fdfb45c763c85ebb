"""What graphs of steps know of groups: the addresses of what groups carry, and the tables of these that graphs read.

Both stay where they are from step to step, so a step like the last one uploads nothing.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import ref

import numpy as np
import torch

from vllm_trie.search.beams import SearchBeams, States
from vllm_trie.search.devices import copy_into_for_search
from vllm_trie.worker.kernels.beams import OF_GROUP, OF_ROW, KernelBeamTables
from vllm_trie.worker.rows.rows import GroupRows
from vllm_trie.worker.select.cohort import MovingRows, SelectionCohort


class HeldBeams(NamedTuple):
    """Where graphs write what the b rows of a group carry; and its addresses, as in `OF_GROUP`."""

    batch: SearchBeams  # [1, b]
    tokens: torch.Tensor  # [b] int64, the newest tokens
    carried: tuple[int, int]
    next_ones: tuple[int, int, int]

    @classmethod
    def of(cls, states: States, width: int, device: torch.device) -> HeldBeams:
        """For `width` rows with the same constraints as `states`."""
        ints = torch.empty(1 + len(states), width, dtype=torch.int64, device=device)
        scores = torch.empty(1, width, dtype=torch.float32, device=device)
        batch = SearchBeams(scores, states=dict(zip(states, ints[1:, None], strict=True)))
        of_scores, of_states = graph_addresses_of(batch)
        return cls(batch, ints[0], (of_scores, of_states), (of_scores, ints.data_ptr(), of_states))

    def fits(self, states: States, width: int) -> bool:
        """Whether it is for as many rows, with the same constraints."""
        return len(self.tokens) == width and self.batch.states.keys() == states.keys()


def graph_addresses_of(beams: SearchBeams) -> tuple[int, int]:
    """Addresses of scores, and of states along a catalog, 0 where there are none."""
    return beams.scores.data_ptr(), sum(state.data_ptr() for state in beams.states.values())


def put_where_graphs_find_it(group: GroupRows, width: int) -> tuple[int, ...]:
    """Makes the addresses at which graphs read what a group's rows carry, and write what `width` rows carry next.

    Returns:
        Addresses, as in `OF_GROUP`. The group keeps alive what is at them.
    """
    beams, held = group.beams, group.held
    if held is None or not held.fits(beams.states, width):
        held = group.held = HeldBeams.of(beams.states, width, beams.scores.device)
    states = {key: state.contiguous() for key, state in beams.states.items()}
    group.beams = beams._replace(scores=beams.scores.contiguous(), states=states)  # usually they are contiguous
    return *graph_addresses_of(group.batch), *held.next_ones


class SelectionGraphTables:
    """The tables of a graph, and the host's copy of their contents.

    Args:
        shape: [G, r], of the rows.
        scale: See `KernelBeamTables`.
        is_copied: Logits are copied for the graph: exactly those of its rows, in their order.
        device: Where the tables are.
    """

    def __init__(self, shape: tuple[int, int], scale: int, is_copied: bool, device: torch.device) -> None:
        (num_groups, num_rows), self._is_copied = shape, is_copied
        self._num_rows, self._num_groups = num_groups * num_rows, num_groups
        self._of_groups = len(OF_ROW) * self._num_rows  # where they begin
        count = self._of_groups + len(OF_GROUP) * num_groups
        self._on_host = np.full(count, -1)
        self._on_device = torch.empty(count, dtype=torch.int64, device=device)
        self._cohort: ref[SelectionCohort] | None = None
        rows, groups = self._on_device[: self._of_groups], self._on_device[self._of_groups :]
        self.on_device = KernelBeamTables(rows.view(len(OF_ROW), -1), groups.view(len(OF_GROUP), -1), scale)

    @property
    def num_bytes(self) -> int:
        return self._on_host.nbytes

    def write(self, cohort: SelectionCohort, of_groups: np.ndarray) -> None:
        """Updates the tables: uploads what has changed, if anything has.

        Args:
            cohort: The cohort whose rows they describe.
            of_groups: [7, G], as `KernelBeamTables.groups`.
        """
        start, known = self._of_groups, self._on_host
        if self._cohort is None or self._cohort() is not cohort:
            moving = MovingRows.of([cohort])
            which = np.arange(self._num_rows) if self._is_copied else cohort.seen
            of_rows = [*moving.rows, moving.places * 0, which, moving.places, moving.places * 0]
            known[:start], self._cohort, start = np.concatenate(of_rows), ref(cohort), 0
        elif np.array_equal(known[start:], of_groups.ravel()):
            return
        known[self._of_groups :] = of_groups.ravel()
        copy_into_for_search(known[start:], self._on_device[start:])

    def count_on(self) -> None:
        """Makes each history one token longer in the host's copy, as the graph does on the device."""
        self._on_host[self._of_groups :][: self._num_groups] += 1
