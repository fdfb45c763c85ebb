"""Let the rows of a group go on from where its search has come to within the forest.

Afterwards they hold what they would hold after as many plain steps: the scheduler replays the same forks on its
block tries, one step at a time, and knows nothing of the forest.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vllm_trie.search.forest import Forest
from vllm_trie.search.step_result import Step
from vllm_trie.worker.forest_step import ForestStep
from vllm_trie.worker.rows import Rows


def accept_path(rows: Rows, forest_step: ForestStep, steps: list[Step], beams: list[list[int]]) -> np.ndarray:
    """Move tokens, blocks and what the draft model has computed to the group's own rows.

    Full blocks are taken over by reference. The block that the roots are in is copied from the row whose tree has the
    beam, unless that row is the beam's own; then the nodes that lead to the beam come together behind their root. Where
    the block becomes full, it is sealed as it was after the step that filled it, and shared from then on.

    Args:
        rows: Of the runner.
        forest_step: The group's forest.
        steps: What its search decided.
        beams: For each step the nodes that its beams were before it.

    Returns:
        [rows, steps] the tokens that each row has got.
    """
    count, width, forest = len(steps), forest_step.num_beams, forest_step.forest
    ancestors = [np.arange(width)]  # by steps from the last one back: the beam before it that each row comes from
    for step in reversed(steps):
        ancestors.append(step.parents[ancestors[-1]])
    leads, slots = ancestors[1], ancestors[count]
    newest = [beams[-1][lead] for lead in leads]

    copies, tables, moves = dict[int, int](), [], list[tuple[int, np.ndarray]]()  # sources by destination
    for number, (table, column, block_size) in enumerate(
        zip(forest_step.blocks, forest_step.columns, forest_step.block_sizes, strict=True)
    ):
        filling = (column + 1) * block_size - forest_step.start  # the step that fills the block of the roots
        tails = np.arange(width)  # whose block each row has in the column of the roots
        moving = list[tuple[int, int, int, int]]()
        if count < filling:
            heirs = [*enumerate(newest)]
        else:
            # A group that keeps one row seals its block, whichever beam leads there.
            sealers = ancestors[count - filling + 1]
            tails = sealers if len(steps[-1].parents) == forest_step.step.rules.width else np.zeros_like(sealers)
            of_sealers = set(zip(tails.tolist(), sealers.tolist(), strict=True))
            heirs = [(row, beams[filling - 1][sealer]) for row, sealer in of_sealers]
        for row, node in heirs:
            copies[table[row, column]] = table[forest.row_of[node], column]
            moving += _along(forest, node, row, 1)
        if count > filling:
            for row, node in enumerate(newest):
                moving += _along(forest, node, row, filling)
        num_columns = column + 1 + (count > filling)
        adopted = table[:, :num_columns].copy()
        adopted[:, :column], adopted[:, column] = table[slots, :column], table[tails, column]
        tables.append(adopted)
        rows_and_places = np.array(moving, dtype=np.int64).reshape(-1, 2, 2)
        from_to = forest_step.slots_of(number, rows_and_places[..., 0], rows_and_places[..., 1])
        moves.append((number, from_to[from_to[:, 0] != from_to[:, 1]].T))
    moved = np.array([(source, destination) for destination, source in copies.items() if source != destination])
    rows.move(moved, moves)
    to = forest_step.group.slots
    rows.adopt(to, to[slots], forest_step.start + 1, tables, forest_step.step.rules.is_controlled)
    num_kept = min(count, forest_step.num_layers) if forest_step.keeps_drafted else 1  # of the root and what follows
    forest_step.group.num_drafted = forest_step.start + num_kept
    return np.stack([step.tokens[beam] for step, beam in zip(steps, reversed(ancestors[:-1]), strict=True)], axis=1)


def _along(forest: Forest, node: int, row: int, first: int) -> Iterator[tuple[int, int, int, int]]:
    """Rows and places of nodes on the path to `node`, from depth `first` on, and those that they get in `row`."""
    for depth, passed in enumerate(forest.path(node)[first:], start=first):
        yield forest.row_of[passed], forest.places[passed], row, depth
