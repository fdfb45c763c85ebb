"""Copies what rows of groups carry into a step that is a CUDA graph, and out of it: one launch each.

A graph reads and writes at the addresses of its capture; what a group carries is stored by the group. So a graph begins
by copying it in, and ends by copying out the next beams. The addresses, and whatever else it must know of rows, are in
two tables at fixed addresses, see `KernelBeamTables`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_trie.search.devices import uploaded_for_search
from vllm_trie.worker.kernels import KernelVariants
from vllm_trie.worker.launches import cdiv

PART = 1024  # rows, or words, of a program
OF_ROW = "slot", "first", "common", "length", "which", "place", "logits"
OF_GROUP = "length", "moved", "scores", "states", "next_scores", "next_tokens", "next_states"
LENGTH, WHICH, LOGITS = (tl.constexpr(OF_ROW.index(name)) for name in ("length", "which", "logits"))
LENGTHS, MOVED, SCORES, STATES, NEXT_SCORES, NEXT_TOKENS, NEXT_STATES = map(tl.constexpr, range(len(OF_GROUP)))


class KernelBeamTables(NamedTuple):
    """What a graph must know of R rows of G groups.

    Args:
        rows: [7, R] int64, named by `OF_ROW`: the fields of `KVFork.rows`, which of the logits are the row's, its place
            in the batch, and where its logits are. The graph itself writes the lengths and the last field.
        groups: [7, G] int64, named by `OF_GROUP`: tokens of each history, to which the graph adds one; by how much the
            logits have moved since the capture, in their units; and the addresses of what rows carry now, and of what
            they carry next.
        scale: Units from one row of the logits to the next.
    """

    rows: torch.Tensor
    groups: torch.Tensor
    scale: int

    @property
    def named_rows(self) -> dict[str, torch.Tensor]:
        """The rows of `rows` by name, [R] each."""
        return dict(zip(OF_ROW, self.rows, strict=True))


class KernelBeams(NamedTuple):
    """What rows carry: [G, r] float32 scores, and [G, r] int64 states where they follow a catalog."""

    scores: torch.Tensor
    states: torch.Tensor | None = None


def launch_take_up_beams(tables: KernelBeamTables, carried: KernelBeams) -> None:
    """Copies what rows carry into `carried`, and fills in what the tables leave to the graph."""
    num_groups, num_rows = carried.scores.shape
    _take_up_beams_kernel[cdiv(num_rows, PART), num_groups](*tables, num_rows, *carried, part=PART)


def launch_put_down_beams(
    tables: KernelBeamTables, going: KernelBeams, tokens: torch.Tensor, words: torch.Tensor, decided: torch.Tensor
) -> None:
    """Copies what b slots of each group carry to the group's own tensors, and makes each history one token longer.

    Args:
        tables: See `KernelBeamTables`.
        going: What they carry.
        tokens: [G, b] int64, their newest.
        words: [G, n] int32, the packed step.
        decided: [G, n], receives a copy of `words`.
    """
    (num_groups, width), count = going.scores.shape, words.shape[1]
    _put_down_beams_kernel[cdiv(max(width, count), PART), num_groups](
        tables.groups, width, *going, tokens, words, decided, count, part=PART
    )


@triton.jit(do_not_specialize=["scale", "num_rows"], do_not_specialize_on_alignment=["rows", "groups"])
def _take_up_beams_kernel(rows, groups, scale, num_rows, scores, states, part: tl.constexpr):
    """See `launch_take_up_beams`: programs per part of a group's rows."""
    group, num_groups = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    row, num_all_rows, groups = tl.program_id(0) * part + tl.arange(0, part), num_groups * num_rows, groups + group
    at, mask = group * num_rows + row, row < num_rows
    length, moved = tl.load(groups + LENGTHS * num_groups), tl.load(groups + MOVED * num_groups)
    tl.store(rows + LENGTH * num_all_rows + at, at * 0 + length, mask=mask)
    which = tl.load(rows + WHICH * num_all_rows + at, mask=mask, other=0)
    tl.store(rows + LOGITS * num_all_rows + at, which * scale + moved, mask=mask)
    own = tl.load(groups + SCORES * num_groups).to(tl.pointer_type(tl.float32))
    tl.store(scores + at, tl.load(own + row, mask=mask), mask=mask)
    if states is not None:
        nodes = tl.load(groups + STATES * num_groups).to(tl.pointer_type(tl.int64))
        tl.store(states + at, tl.load(nodes + row, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["width", "count"], do_not_specialize_on_alignment=["groups", "states", "tokens"])
def _put_down_beams_kernel(groups, width, scores, states, tokens, words, decided, count, part: tl.constexpr):
    """See `launch_put_down_beams`: programs per part of a group's slots, and of its words."""
    group, num_groups = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    slot, groups = tl.program_id(0) * part + tl.arange(0, part), groups + group
    at, mask = group * width + slot, slot < width
    own = tl.load(groups + NEXT_SCORES * num_groups).to(tl.pointer_type(tl.float32))
    tl.store(own + slot, tl.load(scores + at, mask=mask), mask=mask)
    newest = tl.load(groups + NEXT_TOKENS * num_groups).to(tl.pointer_type(tl.int64))
    tl.store(newest + slot, tl.load(tokens + at, mask=mask), mask=mask)
    if states is not None:
        nodes = tl.load(groups + NEXT_STATES * num_groups).to(tl.pointer_type(tl.int64))
        tl.store(nodes + slot, tl.load(states + at, mask=mask), mask=mask)
    word, is_word = group * count + slot, slot < count
    tl.store(decided + word, tl.load(words + word, mask=is_word), mask=is_word)
    if tl.program_id(0) == 0:
        tl.store(groups + LENGTHS * num_groups, tl.load(groups + LENGTHS * num_groups) + 1)


def warm_up_kernels(serving: KernelVariants) -> None:
    """Copies one row in and out, with and without a catalog."""
    device = serving.device
    scores, words, decided = (torch.zeros(1, 1, dtype=of, device=device) for of in (torch.float32, *[torch.int32] * 2))
    states, tokens = torch.zeros(2, 1, 1, dtype=torch.int64, device=device)
    addresses = [tensor.data_ptr() for tensor in (scores, states, scores, tokens, states)]
    groups = uploaded_for_search(np.array([0, 0, *addresses])[:, None], device)
    tables = KernelBeamTables(torch.zeros(len(OF_ROW), 1, dtype=torch.int64, device=device), groups, 1)
    for carried in (KernelBeams(scores), KernelBeams(scores, states)):
        launch_take_up_beams(tables, carried)
        launch_put_down_beams(tables, carried, tokens, words, decided)
