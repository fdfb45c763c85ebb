"""Let the rows of a group go on from where its search has come to within the forest.

Afterwards they hold what they would hold after as many plain steps: the scheduler replays the same forks on its
block tries, one step at a time, and knows nothing of the forest.
"""

from __future__ import annotations

import numpy as np

from vllm_trie.search.step_result import Step
from vllm_trie.worker.forest_step import ForestStep
from vllm_trie.worker.rows import Rows


def accept_path(rows: Rows, forest_step: ForestStep, steps: list[Step], beams: list[list[int]]) -> np.ndarray:
    """Move tokens, blocks and what the draft model has computed to the group's own rows.

    Full blocks are taken over by reference. A block that was written in this step is copied from a row of the forest
    that leads to the same beam, unless that row is the beam's own. Where the block that the roots are in becomes
    full, it is sealed as it was after the step that filled it, and shared from then on.

    Args:
        rows: Of the runner.
        forest_step: The group's forest.
        steps: What its search decided.
        beams: For each step the nodes that its beams were before it.

    Returns:
        [rows, steps] the tokens that each row has got.
    """
    count, width = len(steps), forest_step.num_beams
    ancestors = [np.arange(width)]  # by steps from the last one back: the beam before it that each row comes from
    for step in reversed(steps):
        ancestors.append(step.parents[ancestors[-1]])
    leads, slots = ancestors[1], ancestors[count]
    newest = [beams[-1][lead] for lead in leads]

    copies = dict[int, int]()  # sources by destination
    tables = []
    for table, column, block_size in zip(forest_step.blocks, forest_step.columns, forest_step.block_sizes, strict=True):
        filling = (column + 1) * block_size - forest_step.start  # the step that fills the block of the roots
        own, tails = table[:width], np.arange(width)  # whose block each row has in the column of the roots
        if count < filling:
            for row, node in enumerate(newest):
                copies[own[row, column]] = _block_with(forest_step, table, node, row, column)
        else:
            # A group that keeps one row seals its block, whichever beam leads there.
            sealers = ancestors[count - filling + 1]
            tails = sealers if len(steps[-1].parents) == forest_step.step.rules.width else np.zeros_like(sealers)
            for row, sealer in set(zip(tails.tolist(), sealers.tolist(), strict=True)):
                copies[own[row, column]] = _block_with(forest_step, table, beams[filling - 1][sealer], row, column)
        if count > filling:
            for row, node in enumerate(newest):
                copies[own[row, column + 1]] = _block_with(forest_step, table, node, row, column + 1)
        num_columns = column + 1 + (count > filling)
        adopted = own[:, :num_columns].copy()
        adopted[:, :column], adopted[:, column] = own[slots, :column], own[tails, column]
        tables.append(adopted)
    moved = np.array([(source, destination) for destination, source in copies.items() if source != destination])
    if len(moved):
        rows.kv_blocks.copy(*moved.T)
    to = forest_step.group.slots
    rows.adopt(to, to[slots], forest_step.start + 1, tables, forest_step.step.rules.is_controlled)
    forest_step.group.num_drafted = forest_step.start + min(count, forest_step.num_layers)
    return np.stack([step.tokens[beam] for step, beam in zip(steps, reversed(ancestors[:-1]), strict=True)], axis=1)


def _block_with(forest_step: ForestStep, table: np.ndarray, node: int, row: int, column: int) -> int:
    """A block with what leads to `node`, preferably that of `row`."""
    holder = row if node in forest_step.forest.rows[row] else forest_step.forest.row_of[node]
    return int(table[holder, column])
