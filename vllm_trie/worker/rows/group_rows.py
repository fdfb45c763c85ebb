"""The rows of beam groups: each is a request with a slot of its own to vLLM's runner, and has a place in its batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.rules import SearchPhase, SearchRules

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.input_batch import InputBatch


class NextBeams(NamedTuple):
    """What the last stage of a pipeline has selected for a group, as an earlier one receives it."""

    parents: torch.Tensor  # [b] int32, on the device
    tokens: torch.Tensor  # [b] int32, likewise
    num_tokens: int  # that the group's rows held then, all of them computed
    have_rows: bool  # already; else they get them in their next step
    received: Any  # the event of its stream after which they are there


@dataclass(slots=True, eq=False)
class GroupRows:
    """The rows of one group, each a request with a slot of its own to vLLM's runner."""

    request: NewRequestData  # as vLLM sent it
    search: SearchRules  # how they select, whatever the phase
    row_ids: list[str]
    batch: SearchBeams  # what they carry, among others that have selected together
    tokens: torch.Tensor  # [rows of the next step] int64 on the device, newest token of each beam
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [rows], once the runner has them
    num_drafted: int = 0  # tokens of each row that the draft model has computed, if there is one
    next_beams: NextBeams | None = None  # on an earlier stage of a pipeline, until the next step
    prompt_index: Any = None  # in which drafts are looked up
    place: int = 0  # of the group in its batch
    phase: SearchPhase | None = None  # of their present step
    rules: SearchRules = field(init=False)  # how they select in this phase: the same object until it is another
    roots: Any = None  # the rows as speculation left them; `tables`: by KV cache group [b, columns] int32 their blocks

    def __post_init__(self) -> None:
        self.rules = self.search

    @property
    def beams(self) -> SearchBeams:
        """What they carry, as a batch of one group."""
        return self.batch.at(self.place)

    @beams.setter
    def beams(self, beams: SearchBeams) -> None:
        self.batch, self.place = beams, 0

    @property
    def prompt(self) -> list[int]:
        return self.request.prompt_token_ids or []


def beams_of_rows(groups: Sequence[GroupRows]) -> SearchBeams:
    """What the rows of some groups carry, which are equally wide and under equal constraints."""
    beams, are_together = groups[0].batch, True  # they have selected together before, as a rule
    for place, group in enumerate(groups):
        are_together &= group.batch is beams and group.place == place
    if are_together and len(beams.scores) == len(groups):
        return beams
    return SearchBeams.join([group.beams for group in groups])


class BatchRows:
    """Where the rows of groups are in the present batch.

    Args:
        batch: vLLM's.
        max_num_reqs: Slots of the runner.
    """

    def __init__(self, batch: InputBatch, max_num_reqs: int) -> None:
        self.batch = batch
        self._place_of_slot = np.full(max_num_reqs, -1)
        self._place_of_slot[batch.idx_mapping_np] = np.arange(batch.num_reqs)

    def places(self, slots: np.ndarray) -> np.ndarray:
        """Of any shape: where the rows in these slots are."""
        return self._place_of_slot[slots]

    def num_tokens(self, places: np.ndarray) -> np.ndarray:
        """Of any shape: how many tokens these rows hold, this step's included."""
        return self.batch.seq_lens_cpu_upper_bound.numpy()[places]

    def first_logits(self, places: np.ndarray) -> np.ndarray:
        """Of any shape: where the logits of these rows begin."""
        return self.batch.cu_num_logits_np[places]

    def num_logits(self, places: np.ndarray) -> np.ndarray:
        """Of any shape: how many logits these rows have."""
        return np.diff(self.batch.cu_num_logits_np)[places]
