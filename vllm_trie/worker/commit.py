"""Let the rows of a group go on from where its search has come to within the forest.

Afterwards they hold what they would hold after as many plain steps: the scheduler replays the same forks on its
block trie, one step at a time, and knows nothing of the forest.
"""

from __future__ import annotations

import numpy as np

from vllm_trie.search.step import Step
from vllm_trie.worker.rows import BeamRows
from vllm_trie.worker.speculate import Speculation


def commit(rows: BeamRows, one: Speculation, steps: list[Step], beams: list[list[int]]) -> np.ndarray:
    """Move tokens, blocks and what the draft model has computed to the group's own rows.

    Full blocks are taken over by reference. A block that was written in this step is copied from a row of the forest
    that leads to the same beam, unless that row is the beam's own. Where the block that the roots are in becomes
    full, it is sealed as it was after the step that filled it, and shared from then on.

    Args:
        rows: The groups of the batch.
        one: The group's forest.
        steps: What its search decided.
        beams: For each step the nodes that its beams were before it.

    Returns:
        [rows, steps] the tokens that each row has got.
    """
    column, count, width = one.column, len(steps), len(one.index)
    filling = (column + 1) * one.block_size - one.start  # the step that fills the block of the roots
    slots = leads = sealers = np.arange(width)
    for number in range(count, 0, -1):
        slots = steps[number - 1].parents[slots]
        leads = slots if number == count else leads
        sealers = slots if number == filling else sealers
    newest = [beams[-1][lead] for lead in leads]

    own, copies = one.blocks[:width], dict[int, int]()  # sources by destination
    tails = np.arange(width)  # whose block each row has in the column of the roots
    if count < filling:
        for row, node in enumerate(newest):
            copies[own[row, column]] = _block_with(one, node, row, column)
    else:
        # A group that keeps one row seals its block, whichever beam leads there.
        tails = sealers if len(steps[-1].parents) == one.step.rules.width else np.zeros_like(sealers)
        for row, sealer in set(zip(tails.tolist(), sealers.tolist(), strict=True)):
            copies[own[row, column]] = _block_with(one, beams[filling - 1][sealer], row, column)
    if count > filling:
        for row, node in enumerate(newest):
            copies[own[row, column + 1]] = _block_with(one, node, row, column + 1)
    moved = np.array([(source, destination) for destination, source in copies.items() if source != destination])
    if len(moved):
        rows.kv_blocks.copy(*moved.T)
    num_columns = column + 1 + (count > filling)
    rows.adopt(one.index, one.index[slots], one.start + 1, own[slots, :column], own[tails, column], num_columns)
    if one.step.rules.is_controlled:
        rows.copy_output_tokens(one.index[slots], one.index)
    one.rows.num_drafted = one.start + min(count, one.num_layers)
    forest, last = one.forest, steps[-1].tokens.tolist()
    of_rows = [[forest.tokens[n] for n in forest.path(node)[1:]] + [t] for node, t in zip(newest, last, strict=True)]
    return np.array(of_rows)


def _block_with(one: Speculation, node: int, row: int, column: int) -> int:
    """A block with what leads to `node`, preferably that of `row`."""
    holder = row if node in one.forest.rows[row] else one.forest.row_of[node]
    return int(one.blocks[holder, column])
