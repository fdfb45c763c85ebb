"""The forest of a speculative step: a tree of proposed continuations for each beam.

A node is a token after its parent; the first nodes, the roots, are the beams' newest tokens. Row i computes the tree of
beam i at consecutive places of its KV cache: the root, then every other node after its parent. In attention, each node
sees the row's past, its ancestors and itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from vllm_trie.search import search_spans

ROOT = -1


class Forest:
    """Drafted continuations of a group's beams.

    Args:
        roots: The newest token of each beam; row i is beam i's.
        max_drafts: The most nodes besides the roots.
    """

    def __init__(self, roots: Sequence[int], max_drafts: int) -> None:
        self.tokens = list(roots)
        self.parents = [ROOT] * len(roots)
        self.depths = [0] * len(roots)
        self.rows = [[node] for node in range(len(roots))]  # the nodes of each row, in the order of its cache
        self.row_of = list(range(len(roots)))  # by node
        self.places = [0] * len(roots)  # by node, in its row
        self._masks = [1] * len(roots)  # bits of the places in its row that a node sees; computed when needed
        self.max_drafts = max_drafts
        self._num_open = max_drafts
        self._children: dict[tuple[int, int], int] = {}

    @classmethod
    def grown(cls, drafted: np.ndarray, rows: np.ndarray, layers: Sequence[int], max_drafts: int) -> Forest:
        """A forest that has grown on a device, where nodes are in the same order: layer by layer.

        Args:
            drafted: [2, nodes], the parents and tokens of all nodes; the parents of roots are `ROOT`.
            rows: [nodes], the row of each node.
            layers: How many nodes each layer has, the roots first.
            max_drafts: See `Forest`.
        """
        (parents, tokens), num_roots = drafted.tolist(), layers[0]
        forest = cls(tokens[:num_roots], max_drafts)
        forest.tokens, forest.parents, forest.row_of = tokens, parents, rows.tolist()
        forest.depths = np.repeat(np.arange(len(layers)), layers).tolist()
        in_rows, counts = rows.argsort(kind="stable"), np.bincount(rows, minlength=num_roots)
        places = np.empty_like(in_rows)
        places[in_rows] = search_spans(0, counts)
        forest.places = places.tolist()
        forest.rows = [nodes.tolist() for nodes in np.split(in_rows, counts.cumsum()[:-1])]
        drafts = zip(parents[num_roots:], tokens[num_roots:], strict=True)
        forest._children = dict(zip(drafts, range(num_roots, len(tokens)), strict=True))
        return forest

    def open(self, num_drafts: int) -> None:
        """Limits the drafts to `num_drafts`, until the next call."""
        self._num_open = num_drafts

    @property
    def num_nodes(self) -> int:
        """Nodes, including the roots."""
        return len(self.tokens)

    @property
    def num_drafts(self) -> int:
        """Nodes, excluding the roots."""
        return len(self.tokens) - len(self.rows)

    @property
    def has_room(self) -> bool:
        """Whether one more node may be added."""
        return self.num_drafts < self._num_open

    def as_arrays(self) -> list[np.ndarray]:
        """The forest's contents; its rows follow from the order of its nodes."""
        return [np.array(self.tokens), np.array(self.parents)]

    def path(self, node: int) -> list[int]:
        """The nodes from a root to `node`."""
        path = [node]
        while (node := self.parents[node]) != ROOT:
            path.append(node)
        return path[::-1]

    def tokens_of_rows(self) -> list[list[int]]:
        """The tokens of each row, in the order of its cache."""
        return [[self.tokens[node] for node in nodes] for nodes in self.rows]

    def leaves(self) -> Iterator[int]:
        """The nodes without children."""
        parents = set(self.parents)
        return (node for node in range(self.num_nodes) if node not in parents)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` with this token, if it was drafted."""
        return self._children.get((node, token))

    def add(self, parent: int, token: int) -> int:
        """Continues `parent` by `token`, for which there must be room. Returns the node, which may exist already."""
        known = self._children.get((parent, token))
        if known is not None:
            return known
        assert self.has_room
        node, row = len(self.tokens), self.row_of[parent]
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.row_of.append(row)
        self.places.append(len(self.rows[row]))
        self.rows[row].append(node)
        self._children[parent, token] = node
        return node

    def attention_mask(self, row: int, first: int = 0) -> np.ndarray:
        """[nodes, nodes of the row] bool: which nodes of its row each node from place `first` on sees.

        These are its ancestors and itself.
        """
        for node in range(len(self._masks), self.num_nodes):
            self._masks.append(self._masks[self.parents[node]] | 1 << self.places[node])
        nodes = self.rows[row]
        num_bytes = -(-len(nodes) // 8)
        masks = b"".join(self._masks[node].to_bytes(num_bytes, "little") for node in nodes[first:])
        by_node = np.frombuffer(masks, dtype=np.uint8).reshape(-1, num_bytes)
        return np.unpackbits(by_node, axis=1, bitorder="little", count=len(nodes)).astype(bool)


def affordable_forest_layers(max_drafts: int, num_layers: int, draft_width: int, least_width: int) -> tuple[int, int]:
    """How many layers fit, and how many drafts each, whatever is drafted.

    A forest of sampled nodes must not be cut by what they are.

    Returns:
        As many layers as possible, and the drafts of each, at least `least_width`; (0, 0) if not even one fits.
    """
    num_layers = min(num_layers, max_drafts // least_width)
    return (num_layers, min(draft_width, max_drafts // num_layers)) if num_layers else (0, 0)


def open_forest_drafts(number: int, num_layers: int, max_drafts: int) -> int:
    """The most drafts of layers 1 to `number` of a searched forest together: the first layers must not take all."""
    return math.ceil(math.sqrt(number / num_layers) * max_drafts)


@lru_cache(4096)  # asked for each search in each step
def useful_forest_layers(max_drafts: int, num_layers: int, draft_width: int, width: int) -> int:
    """How many layers of a searched forest may each have a draft for each of `width` beams; at least one.

    A narrower layer hardly ever leads on, and its drafts are missing in the layers before it.
    """

    def narrowest(layers: int) -> int:
        most, sizes = min(layers * draft_width, max_drafts), list[int]()
        for number in range(1, layers + 1):
            sizes.append(min(draft_width, open_forest_drafts(number, layers, most) - sum(sizes)))
        return min(sizes)

    least = min(width, draft_width)
    return next((layers for layers in range(num_layers, 1, -1) if narrowest(layers) >= least), 1)


class Layer(NamedTuple):
    """The newest layer of a forest that is searched as plain beam search would be; on the host."""

    nodes: list[int]
    scores: np.ndarray  # [nodes] float32, rank scores: the target's for roots, plus the draft model's log-probabilities
    num_narrow: int  # the first nodes, which beam search with the draft model alone would keep


class BestTokens(NamedTuple):
    """The best tokens after each node of a layer, best first; on the host."""

    logprobs: np.ndarray  # [nodes, n] float32, of the draft model; -inf where a hypothesis ends
    tokens: np.ndarray  # [nodes, n] integers


def draft_forest_layer(forest: Forest, layer: Layer, best: BestTokens, width: int, draft_width: int) -> Layer:
    """Drafts one more layer: the narrow beam's best children first, then the best others.

    The forest leads on where it has all of the target's beams, so what beam search of the target's width would keep,
    were the draft model the target, comes first. (The best `draft_width` alone would miss some even with a perfect
    draft model.) Children that do not fit are left out, the worst first.

    Args:
        best: At least `draft_width` tokens of each node, if it has as many.
        width: Beams of the search.
        draft_width: The most nodes of the new layer.

    Returns:
        The new layer, empty if nothing can be drafted.
    """
    scores = best.logprobs + layer.scores[:, None]
    by_rank = np.argsort(-scores, axis=None, kind="stable")
    positions, ranks = np.unravel_index(by_rank[scores.ravel()[by_rank] > -np.inf], scores.shape)
    is_narrow = positions < layer.num_narrow
    is_narrow &= np.cumsum(is_narrow) <= width
    order = np.concatenate([np.flatnonzero(is_narrow), np.flatnonzero(~is_narrow)])[:draft_width]

    nodes, kept = list[int](), list[float]()
    for candidate in order.tolist():
        if not forest.has_room:
            break
        position, rank = positions[candidate], ranks[candidate]
        nodes.append(forest.add(layer.nodes[position], int(best.tokens[position, rank])))
        kept.append(scores[position, rank])
    return Layer(nodes, np.array(kept, dtype=np.float32), min(int(is_narrow.sum()), len(nodes)))
