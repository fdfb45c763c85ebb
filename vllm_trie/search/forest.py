"""The forest of a speculative step: continuations that are proposed, and the rows that compute them.

A node is a token after its parent; the first nodes, the roots, are the beams' newest tokens. Rows are
paths from a root to a leaf, so any attention that is causal along a row verifies the forest. Rows repeat
the nodes they have in common; how many rows and tokens that may cost is given.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch

ROOT = -1


class RowFork(NamedTuple):
    """A row that begins as a copy of another one."""

    source: int
    destination: int


class Forest:
    """Drafted continuations of a group's beams.

    Args:
        roots: The newest token of each beam; row i is beam i's own.
        max_rows: Rows that may be used, those of the roots among them.
        max_tokens: Tokens that all rows together may compute.
    """

    def __init__(self, roots: Sequence[int], max_rows: int, max_tokens: int) -> None:
        self.tokens = list(roots)
        self.parents = [ROOT] * len(roots)
        self.rows = [[node] for node in range(len(roots))]  # nodes from the root to the leaf
        self.row_of = list(range(len(roots)))  # by node: the first row that leads through it
        self.num_row_tokens = len(roots)
        self._children: dict[tuple[int, int], int] = {}
        self._most_rows = self._max_rows = max_rows
        self._max_tokens = max_tokens

    def open_rows(self, share: float) -> None:
        """Let only this share of the rows that are no root's be used, until more are opened."""
        num_roots = self.parents.count(ROOT)
        self._max_rows = num_roots + math.ceil(share * (self._most_rows - num_roots))

    @property
    def num_nodes(self) -> int:
        """Nodes, the roots among them."""
        return len(self.tokens)

    def as_arrays(self) -> list[np.ndarray]:
        """All that the forest is: its rows follow from the order of its nodes."""
        return [np.array(self.tokens), np.array(self.parents)]

    def path(self, node: int) -> list[int]:
        """The nodes from a root to `node`."""
        row = self.rows[self.row_of[node]]
        return row[: row.index(node) + 1]

    def child(self, node: int, token: int) -> int | None:
        """The node of `token` after `node`, if it was drafted."""
        return self._children.get((node, token))

    def has_room(self, parent: int) -> bool:
        """Whether `parent` can have one more child."""
        row = self.rows[self.row_of[parent]]
        if row[-1] == parent:
            return self.num_row_tokens < self._max_tokens
        cost = len(self.path(parent)) + 1
        return len(self.rows) < self._max_rows and self.num_row_tokens + cost <= self._max_tokens

    def add(self, parent: int, token: int) -> tuple[int, RowFork | None]:
        """Continue `parent` by `token`.

        Its first child goes on in its row. For any other a row is forked, which happens before that row
        computes its newest node.

        Returns:
            The node, and the fork that it needs. A node that there is already needs none.
        """
        known = self._children.get((parent, token))
        if known is not None:
            return known, None
        assert self.has_room(parent)
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self._children[parent, token] = node
        row = self.row_of[parent]
        if self.rows[row][-1] == parent:
            self.rows[row].append(node)
            self.row_of.append(row)
            self.num_row_tokens += 1
            return node, None
        self.rows.append([*self.path(parent), node])
        self.row_of.append(len(self.rows) - 1)
        self.num_row_tokens += len(self.rows[-1])
        return node, RowFork(row, len(self.rows) - 1)


def affordable(
    num_roots: int, max_rows: int, max_tokens: int, num_layers: int, draft_width: int, least_width: int
) -> tuple[int, int]:
    """How many layers, of how many drafts each, have room whatever is drafted.

    A forest of drawn nodes must not be cut according to what they are. Each layer prolongs a row at least, and
    forks the others.

    Returns:
        As many layers as possible, and their drafts, at least `least_width`; (0, 0) if there is no room for one.
    """
    for layers in range(num_layers, 0, -1):
        of_forks = sum(depth + 1 for depth in range(1, layers + 1))  # tokens, of a row forked at each depth
        forks = min((max_rows - num_roots) // layers, (max_tokens - num_roots - layers) // of_forks)
        if forks + 1 >= least_width:
            return layers, min(draft_width, forks + 1)
    return 0, 0


class Room(NamedTuple):
    """What a forest takes beyond its roots."""

    rows: int
    tokens: int


def least_affordable(least_width: int) -> Room:
    """With how much room `affordable` finds some for one layer: a row is prolonged, the others are forked at a root."""
    return Room(least_width - 1, 1 + 2 * (least_width - 1))


class Layer(NamedTuple):
    """The newest layer of a forest that is searched as plain beam search would search it."""

    nodes: list[int]
    scores: torch.Tensor  # [nodes] float32, what ranks them: of the target for roots, by the draft's logits since then
    narrow: Collection[int]  # positions of those that beam search by the draft model alone would have kept


def grow(
    forest: Forest, layer: Layer, logprobs: torch.Tensor, width: int, draft_width: int
) -> tuple[Layer, list[RowFork]]:
    """Draft one more layer: the narrow beam's best children first, then the best others.

    The target's beams are found in the forest if all of them are; so what beam search of the target's own width
    would keep, were the draft model the target, comes first. (With the best `draft_width` alone even a perfect
    draft misses some.) Children for which there is no room are left out, the worst first.

    Args:
        logprobs: [nodes, V] of the draft model after each node; -inf where a hypothesis ends.
        width: Beams of the search.
        draft_width: Nodes of the new layer.

    Returns:
        The new layer, empty if nothing can be drafted, and the rows to fork before it is computed.
    """
    best, tokens = logprobs.topk(min(draft_width, logprobs.shape[-1]), dim=-1)
    scores = (best + layer.scores[:, None]).cpu().numpy()
    by_rank = np.argsort(-scores, axis=None, kind="stable")
    positions, ranks = np.unravel_index(by_rank[scores.ravel()[by_rank] > -np.inf], scores.shape)
    is_narrow = np.isin(positions, list(layer.narrow))
    is_narrow &= np.cumsum(is_narrow) <= width
    order = np.concatenate([np.flatnonzero(is_narrow), np.flatnonzero(~is_narrow)])[:draft_width]
    num_narrow = int(is_narrow.sum())

    chosen = tokens.cpu().numpy()
    nodes, forks, kept, narrow = list[int](), list[RowFork](), list[float](), set[int]()
    for place, candidate in enumerate(order.tolist()):
        position, rank = positions[candidate], ranks[candidate]
        if not forest.has_room(layer.nodes[position]):
            continue
        node, fork = forest.add(layer.nodes[position], int(chosen[position, rank]))
        if place < num_narrow:
            narrow.add(len(nodes))
        nodes.append(node)
        kept.append(scores[position, rank])
        forks += [fork] if fork is not None else []
    return Layer(nodes, torch.tensor(kept, dtype=torch.float32, device=logprobs.device), narrow), forks
