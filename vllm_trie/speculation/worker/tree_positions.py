"""The positions of drafts in trees, which `runner` writes after vLLM has counted the tokens of each row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.search.devices import uploaded_for_search
from vllm_trie.speculation.worker.forest_step import ForestStep
from vllm_trie.worker.rows.rows import BatchRows


class DraftTreePositions(NamedTuple):
    """The positions of nodes, which are consecutive tokens but follow their parents; on the device."""

    at: torch.Tensor  # [nodes] int64, their indices in the batch
    positions: torch.Tensor  # [nodes] int64
    slots: np.ndarray  # [nodes], of their rows

    def write(self, positions: torch.Tensor, offsets: np.ndarray | None = None) -> None:
        """Writes them into the positions [..., T] of a batch.

        Args:
            positions: Written.
            offsets: [slots], by how much the positions of each row are shifted; None: not at all.
        """
        of_nodes = self.positions
        if offsets is not None:
            of_nodes = of_nodes + uploaded_for_search(offsets[self.slots], positions.device)
        positions[..., self.at] = of_nodes.to(positions.dtype)


def draft_tree_positions(forests: Iterable[ForestStep], rows: BatchRows) -> DraftTreePositions:
    """The positions in forests that the host has made; at least one forest."""
    at, positions, slots = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for forest_step in forests:
        forest, of_rows = forest_step.forest, forest_step.group.slots
        slots.append(of_rows[forest.row_of])
        at.append(forest_step.nodes_at(rows.batch.query_start_loc_np[rows.places(of_rows)]))
        positions.append(forest_step.start + np.array(forest.depths))
    of_nodes = np.stack([np.concatenate(at), np.concatenate(positions)])
    on_device = uploaded_for_search(of_nodes, rows.batch.positions.device)
    return DraftTreePositions(on_device[0], on_device[1], np.concatenate(slots))
