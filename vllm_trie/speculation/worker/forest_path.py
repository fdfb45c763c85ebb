"""From which state the rows of a group continue, once its search has reached some nodes of the forest.

Afterwards they hold what they would hold after as many plain steps: the scheduler replays the same forks on its block
tries, one step at a time, and does not know the forest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vllm_trie.search.step_result import SearchStepResult
from vllm_trie.speculation.search.forest import Forest
from vllm_trie.speculation.worker.forest_step import ForestStep
from vllm_trie.speculation.worker.table_entries import DraftTableEntries
from vllm_trie.worker.kv.kv_moves import KVMoves


class AcceptedPath(NamedTuple):
    """What the b rows of one group hold after a speculative step."""

    slots: np.ndarray  # [b]
    sources: np.ndarray  # [b], slots of the rows whose histories they continue
    num_prompt: int  # tokens that all these histories share
    num_tokens: int  # tokens of the histories
    tokens: np.ndarray  # [b, steps], the new tokens of each row
    tables: list[np.ndarray]  # by KV cache group: [b, columns] int32, the blocks of the rows
    entries: list[DraftTableEntries]  # by KV cache group: the entries of `tables` that change
    moves: KVMoves  # what must be copied into these blocks
    is_controlled: bool  # whether rows also take over the state of logits processors


def accepted_forest_path(
    forest_step: ForestStep, steps: list[SearchStepResult], beams: list[list[int]]
) -> AcceptedPath:
    """Assigns the beams to the group's rows: their tokens, blocks and what the draft model has computed.

    Full blocks are taken over by reference. The block of the roots is copied from the row whose tree has the beam,
    unless that row is the beam's own; then the nodes that lead to the beam are moved together after their root. Where
    the block fills up, it is sealed as it was after the step that filled it, and shared from then on.

    Args:
        forest_step: The group's forest.
        steps: What its search decided.
        beams: For each step, the nodes of its beams before it.
    """
    count, width, forest = len(steps), forest_step.num_beams, forest_step.forest
    ancestors = [np.arange(width)]  # by steps back from the last: the earlier beam that each row descends from
    for step in reversed(steps):
        ancestors.append(step.parents[ancestors[-1]])
    leads, slots = ancestors[1], ancestors[count]
    newest = [beams[-1][lead] for lead in leads]

    copies = dict[int, int]()  # sources by destination
    tables, entries, tokens = list[np.ndarray](), list[DraftTableEntries](), list[np.ndarray]()
    for number, (table, column, block_size) in enumerate(
        zip(forest_step.blocks, forest_step.columns, forest_step.block_sizes, strict=True)
    ):
        filling = (column + 1) * block_size - forest_step.start  # the step that fills the block of the roots
        tails = np.arange(width)  # the row whose block each row has in the column of the roots
        moving = list[tuple[int, int, int, int]]()
        if count < filling:
            heirs = [*enumerate(newest)]
        else:
            # A group that keeps one row seals its block, whichever beam leads to it.
            sealers = ancestors[count - filling + 1]
            tails = sealers if len(steps[-1].parents) == forest_step.rules[0].width else np.zeros_like(sealers)
            of_sealers = set(zip(tails.tolist(), sealers.tolist(), strict=True))
            heirs = [(row, beams[filling - 1][sealer]) for row, sealer in of_sealers]
        for row, node in heirs:
            copies[table[row, column]] = table[forest.row_of[node], column]
            moving += _along_forest_path(forest, node, row, 1)
        if count > filling:
            for row, node in enumerate(newest):
                moving += _along_forest_path(forest, node, row, filling)
        num_columns = column + 1 + (count > filling)
        adopted = table[:, :num_columns].copy()
        adopted[:, :column], adopted[:, column] = table[slots, :column], table[tails, column]
        tables.append(adopted)
        entries.append(DraftTableEntries.of(forest_step.group.slots, number, adopted, known=table))
        rows_and_places = np.array(moving, dtype=np.int64).reshape(-1, 2, 2)
        from_to = forest_step.slots_of(number, rows_and_places[..., 0], rows_and_places[..., 1])
        tokens.append(from_to[from_to[:, 0] != from_to[:, 1]].T)
    copied = [(source, destination) for destination, source in copies.items() if source != destination]
    num_kept = min(count, forest_step.num_layers) if forest_step.keeps_drafted else 1  # of the root and what follows it
    forest_step.group.num_drafted = forest_step.start + num_kept
    group, of_steps = forest_step.group, zip(steps, reversed(ancestors[:-1]), strict=True)
    return AcceptedPath(
        *(group.slots, group.slots[slots], len(group.prompt), forest_step.start + 1),
        np.stack([step.tokens[beam] for step, beam in of_steps], axis=1).astype(np.int64),
        *(tables, entries, KVMoves(np.array(copied, np.int64).reshape(-1, 2), tokens)),
        forest_step.rules[0].is_controlled,
    )


def _along_forest_path(forest: Forest, node: int, row: int, first: int) -> Iterator[tuple[int, int, int, int]]:
    """Rows and places of the nodes on the path to `node`, from depth `first` on, and their new ones in `row`."""
    for depth, passed in enumerate(forest.path(node)[first:], start=first):
        yield forest.row_of[passed], forest.places[passed], row, depth
