"""Items of a catalog that a search must not return, as the nodes that are closed to it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from vllm_trie.catalog.arrays import catalog_level_starts
from vllm_trie.options.shown import shown_option_name
from vllm_trie.search.constraints.closed_nodes import (
    IS_CLOSED,
    KIND_BITS,
    NO_ITEM_ENDS,
    NO_WAY_ON,
    PART,
    NodeCodes,
)

if TYPE_CHECKING:
    from vllm_trie.catalog import Catalog

ZERO = np.zeros(1, np.int64)


@dataclass(frozen=True, eq=False)
class Exclusion:
    """What is closed to a search in one version of a catalog.

    Args:
        digest: By which equal ones are known.
        nodes: What a device looks up.
    """

    digest: str
    nodes: NodeCodes
    num_items = 0  # that a device holds for it

    @classmethod
    def of(cls, catalog: Catalog, item_ids: np.ndarray, is_strict: bool = False) -> Self:
        """Exclude all sequences of some items.

        Args:
            item_ids: [n] int64, ascending, each once.
            is_strict: Refuse ids that no item has; else they are ignored.

        Raises:
            ValueError: an id is unknown, and `is_strict`.
        """
        ended, unknown = catalog.nodes_of_items(item_ids)
        if is_strict and len(unknown):
            raise ValueError(f"{unknown[0]} is no item of this catalog; leave it out")
        return cls(exclusion_digest(catalog, item_ids), _closed_nodes(catalog, ended))

    @property
    def num_bytes_on_device(self) -> int:
        """That it takes of `ClosedNodes`, and as much again, as these grow by doubling."""
        codes = self.nodes.codes
        return 2 * codes.itemsize * PART * (len(codes) // PART + 1)


@dataclass(frozen=True)
class SentExclusion:
    """The items that a request must not return, on their way to the engine.

    Args:
        item_ids: [n] int64 in bytes, ascending, each once.
        catalog: The digest of the version for which the front end has looked them up.
        codes: [m] int64 in bytes, and `most_together`: the `NodeCodes` there.
    """

    item_ids: bytes
    catalog: str
    codes: bytes
    most_together: int

    @classmethod
    def of(cls, catalog: Catalog, item_ids: Any) -> Self:
        """Look ids up, each of which must be an item's.

        Raises:
            ValueError: one is not.
        """
        ids = np.sort(np.array(item_ids, np.int64))
        ids = ids[np.append(True, ids[1:] != ids[:-1])[: len(ids)]]
        nodes = Exclusion.of(catalog, ids, is_strict=True).nodes
        return cls(ids.tobytes(), catalog.digest, nodes.codes.tobytes(), nodes.most_together)

    @property
    def ids(self) -> np.ndarray:
        """[n] int64."""
        return np.frombuffer(self.item_ids, np.int64)

    def looked_up(self, digest: str) -> Exclusion:
        """What the front end has found, by the digest that it has."""
        return Exclusion(digest, NodeCodes(np.frombuffer(self.codes, np.int64), self.most_together))


def read_item_list(path: str) -> np.ndarray:
    """The ids [n] int64, ascending, each once, of a file with one per line; blank lines are skipped.

    Raises:
        ValueError: it cannot be read, or has what is no id.
    """
    try:
        return np.unique(np.array(Path(path).read_text().split(), np.int64))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; pass a file with one item id per line") from None
    except (ValueError, OverflowError) as error:
        why = shown_option_name(str(error))
        raise ValueError(f"{path} is no list of items: {why}; write one id per line, an integer") from None


def exclusion_digest(catalog: Catalog, item_ids: np.ndarray) -> str:
    """By which what is closed is known, of ids [n] int64, ascending."""
    return hashlib.sha256(catalog.digest.encode() + item_ids.tobytes()).hexdigest()


def _closed_nodes(catalog: Catalog, ended: np.ndarray) -> NodeCodes:
    """What is closed where items end no more.

    A node is dead if no item ends there and all of its children are dead; so it goes from the leaves up. What is below
    a dead node is left out, as no search comes there. The root is never closed.

    Args:
        ended: [n] int32, ascending: where these items end.
    """
    first_child, is_item, parents, levels = catalog.first_child, catalog.is_item, catalog.parents, list[np.ndarray]()
    most_together, shut = 0, ended[:0]  # nodes of the next level up, all of whose children are dead
    for start in reversed(catalog_level_starts(first_child)[1:-1]):
        at = ended.searchsorted(start)
        ended, here = ended[:at], ended[at:]
        nodes, kinds = _with_kinds(here, shut)
        num_children = first_child[nodes + 1] - first_child[nodes]
        kinds[(num_children == 0) | ((kinds == NO_WAY_ON) & ~is_item[nodes])] = IS_CLOSED
        is_dead = kinds == IS_CLOSED
        own = parents[nodes]  # ascending, as nodes are
        first = np.flatnonzero(own[1:] != own[:-1]) + 1
        first = np.concatenate([ZERO[: len(own)], first])
        above, num_closed = own[first], np.diff(first, append=len(own))
        dead_before = np.append(ZERO, is_dead.cumsum())
        num_dead = dead_before[first + num_closed] - dead_before[first]
        is_shut = (num_dead == first_child[above + 1] - first_child[above]) & (above > 0)
        shut = above[is_shut]
        is_dead_above = is_shut.copy()
        is_dead_above[is_shut] = ~is_item[shut] | np.isin(shut, ended)
        codes = nodes.astype(np.int64) << KIND_BITS | kinds
        if is_dead_above.any():
            codes = codes[np.repeat(~is_dead_above, num_closed)]
        levels.append(codes)
        most_together = max(most_together, int(num_closed[~is_dead_above].max(initial=0)))
    return NodeCodes(np.concatenate(levels[::-1]), most_together)


def _with_kinds(ended: np.ndarray, shut: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[n] nodes of a level, ascending, where items end no more, or all of whose children are dead; [n] int8 which."""
    kinds = np.full(len(ended), NO_ITEM_ENDS, np.int8)
    if not len(shut):
        return ended, kinds
    nodes, kinds = np.append(ended, shut), np.append(kinds, np.full(len(shut), NO_WAY_ON, np.int8))
    order = nodes.argsort(kind="stable")
    nodes, kinds = nodes[order], kinds[order]
    is_again = np.append(False, nodes[1:] == nodes[:-1])  # it is both
    kinds[:-1][is_again[1:]] = IS_CLOSED
    return nodes[~is_again], kinds[~is_again]
