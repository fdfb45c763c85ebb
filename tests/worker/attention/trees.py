"""Batches in which rows compute trees, and what attention of them must be, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from tests.support.sharing import Batch, Group
from vllm_trie.worker.attention.shared_rows import RowTrees, pack_attention_masks


@dataclass
class TreeGroup(Group):
    """Rows whose own tokens end in trees; as many tokens of each come before them. `computed` are their last ones."""

    trees: Sequence[np.ndarray] = ()  # by row: [nodes, nodes] bool, what each sees of its tree


class TreeBatch(Batch):
    """The same, with trees."""

    def __init__(self, groups: Sequence[Group], *args: Any, **kwargs: Any) -> None:
        super().__init__(groups, *args, **kwargs)
        self._order: torch.Tensor | None = None  # of each token that of its group in whose place it stands
        self.trees: dict[int, np.ndarray] = {}  # by row of the batch
        for number, group in enumerate(groups):
            if isinstance(group, TreeGroup):
                places = self.rows[number].places
                self.trees |= dict(zip(places.tolist(), group.trees, strict=True))
                computed = [tree[-count:] for tree, count in zip(group.trees, group.computed, strict=True)]
                start = int(self.lengths[places[0]]) - len(group.trees[0])
                self.rows[number] = self.rows[number]._replace(trees=RowTrees(start, computed))

    def forget_masks(self, device: str) -> None:
        """Let the device alone know what the tokens see of trees, of which each row computes one."""
        for number, rows in enumerate(self.rows):
            assert rows.trees is not None
            masks = torch.from_numpy(pack_attention_masks(rows.trees.masks)).to(device)
            self.rows[number] = rows._replace(trees=RowTrees(rows.trees.start, masks))

    def forget_rows(self, device: str, which: Sequence[int]) -> None:
        """Let the device alone know of some groups' trees in which row each token lies, whichever row computes it."""
        shared, order = self.shared, torch.arange(len(self.queries))
        for number in which:
            rows, first, end = self.rows[number], *shared.starts[number : number + 2].tolist()
            assert rows.trees is not None
            shuffled = np.random.default_rng(number).permutation(end - first)
            order[shared.places[first:end]] = torch.from_numpy(shared.places[first:end][shuffled]).long()
            known = pack_attention_masks(rows.trees.masks), shared.rows[first:end], shared.lengths[first:end]
            on_device = [torch.from_numpy(array[shuffled]).to(device) for array in known]
            self.rows[number] = rows._replace(trees=RowTrees(rows.trees.start, *on_device))
        self.queries, self._order = self.queries[order], order

    def reference(
        self, window: int | None = None, soft_cap: float = 0.0, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[tokens, heads, head size] float64, of all rows."""
        outputs, heads = [], self.queries.shape[1] // self.keys.shape[1]
        order = torch.arange(len(self.queries)) if self._order is None else self._order
        queries = self.queries[order.argsort()]
        for row, (first, end) in enumerate(zip(self.starts[:-1], self.starts[1:], strict=True)):
            keys, values = (
                part[self.slots(row)].double().repeat_interleave(heads, 1) for part in (self.keys, self.values)
            )
            sees = self.sees(row, window)[first - end :]
            values[~sees.any(0)] = 0  # which may be no numbers
            scores = torch.einsum("qhd,khd->hqk", queries[first:end].double(), keys) * self.scale
            if soft_cap:
                scores = soft_cap * (scores / soft_cap).tanh()
            scores = scores.masked_fill(~sees, -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(sees), -1)], dim=-1)
            weights = scores.softmax(-1)[..., : len(keys)]
            outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(outputs)[order]

    def sees(self, row: int, window: int | None = None) -> torch.Tensor:
        """[length, length] bool, which tokens of a row see which."""
        length = int(self.lengths[row])
        sees = torch.ones(length, length, dtype=torch.bool).tril()
        if row in self.trees:
            nodes = len(self.trees[row])
            sees[-nodes:, -nodes:] = torch.from_numpy(self.trees[row])
        positions = sees.sum(1) - 1
        return sees if window is None else sees & (positions[:, None] - positions < window)

    def forget_what_is_before(self, window: int | None) -> None:
        """Let blocks before all that any row sees be no numbers."""
        seen = torch.zeros(len(self.keys), dtype=torch.bool)
        for row, count in enumerate(self.starts.diff().tolist()):
            first = int(self.sees(row, window)[-count:].any(0).nonzero()[0])
            seen[self.slots(row)[first:]] = True
        unseen = ~seen.view(-1, self.block_size).any(1).repeat_interleave(self.block_size)
        self.keys[unseen] = self.values[unseen] = torch.nan


def random_tree(num_nodes: int, seed: int) -> np.ndarray:
    """[nodes, nodes] bool: each node but the first is a child of any one before it."""
    random, sees = np.random.default_rng(seed), np.eye(num_nodes, dtype=bool)
    for node in range(1, num_nodes):
        sees[node] |= sees[random.integers(node)]
    return sees


def all_kinds(block_size: int) -> TreeBatch:
    """A batch of all kinds of rows: some that share blocks, trees, and an ordinary one."""
    of_groups = [(3, 1, 9, 70), (2, 2, 1)]
    trees = [[random_tree(nodes, nodes) for nodes in of_group] for of_group in of_groups]
    groups = [Group(2, 2, [5, 17], [1, 1])]
    groups += [TreeGroup(len(one), 1, [30 + len(tree) for tree in one], [*map(len, one)], trees=one) for one in trees]
    return TreeBatch(groups, 4, 2, 32, block_size, others=1)


@st.composite
def any_trees(draw: st.DrawFn, most_rows: int, most_before: int, most_nodes: int, most_blocks: int) -> TreeGroup:
    """A group of trees of so many nodes at most; each row computes all of its tree, or its last ones, as drafts do."""
    num_rows, blocks, before = (
        draw(st.integers(low, most)) for low, most in ((1, most_rows), (0, most_blocks), (0, most_before))
    )
    trees = [random_tree(draw(st.integers(1, most_nodes)), draw(st.integers(0, 99))) for _ in range(num_rows)]
    are_drafts = draw(st.booleans())
    computed = [draw(st.integers(1, len(tree))) if are_drafts else len(tree) for tree in trees]
    own = [before + len(tree) for tree in trees]
    return TreeGroup(num_rows, blocks, own, computed, draw(st.integers(0, blocks)), trees)
