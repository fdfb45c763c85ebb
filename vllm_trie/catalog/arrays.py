"""Builds a trie as arrays: nodes level by level, and the children of a node consecutively, ascending by token."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from vllm_trie.catalog.items import CatalogItems

MOST_NODES = (1 << 31) - (1 << 24)  # and the children of the last one still have int32 numbers
TOKEN_BITS = 31


class CatalogArrays(NamedTuple):
    """Node 0 is the root. The children of node s are `first_child[s]` to `first_child[s + 1] - 1`."""

    item_ids: np.ndarray  # [items] int64, in the order of their nodes
    first_child: np.ndarray  # [nodes + 1] int32
    tokens: np.ndarray  # [nodes] int32, the token by which a node is entered; -1 at the root
    is_item: np.ndarray  # [nodes] bool


def build_catalog_arrays(items: CatalogItems, progress: Callable[[range], Iterable[int]]) -> CatalogArrays:
    """The trie of some items. Of items with the same tokens the id of the first is kept.

    A level is one sort by (node of the level above, token), over the items that are long enough.

    Args:
        progress: Wraps the depths; the trie is built level by level.

    Raises:
        ValueError: there are no items, or too many to number.
    """
    if not len(items.lengths):
        raise ValueError("a catalog needs at least one item")
    starts = items.lengths.cumsum(dtype=np.int64) - items.lengths
    longer = np.arange(len(items.lengths))  # the items with a token at this depth, in input order
    parents = np.zeros(len(longer), np.int64)  # their nodes, counted from the first node of the level
    num_parents, num_nodes = 1, 1
    tokens, num_children = [np.array([-1], np.int32)], []
    is_item, item_ids = [np.zeros(1, bool)], []
    for depth in progress(range(items.lengths.max())):
        keys = parents << TOKEN_BITS | items.tokens[starts[longer] + depth]
        order = np.argsort(keys)
        keys = keys[order]
        is_new = np.append(True, keys[1:] != keys[:-1])
        nodes = np.empty_like(order)
        nodes[order] = is_new.cumsum() - 1
        keys = keys[is_new]
        num_nodes += len(keys)
        if num_nodes > MOST_NODES:
            raise ValueError(f"the items need more than {MOST_NODES} nodes; split them into several catalogs")
        tokens.append((keys & ((1 << TOKEN_BITS) - 1)).astype(np.int32))
        num_children.append(np.bincount(keys >> TOKEN_BITS, minlength=num_parents))
        ends = items.lengths[longer] == depth + 1
        item = np.full(len(keys), -1)
        item[nodes[ends][::-1]] = longer[ends][::-1]  # written last by the first of equal items
        is_item.append(item >= 0)
        item_ids.append(items.ids[item[item >= 0]])
        longer, parents, num_parents = longer[~ends], nodes[~ends], len(keys)
    num_children.append(np.zeros(num_parents, np.int64))
    first_child = np.append(1, 1 + np.concatenate(num_children).cumsum()).astype(np.int32)
    return CatalogArrays(np.concatenate(item_ids), first_child, np.concatenate(tokens), np.concatenate(is_item))


def catalog_level_starts(first_child: np.ndarray) -> list[int]:
    """The first node of each level, and then the number of nodes."""
    starts = [0, 1]
    while starts[-1] < len(first_child) - 1:
        starts.append(int(first_child[starts[-1]]))
    return starts
