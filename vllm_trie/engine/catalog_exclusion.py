"""Items of a catalog that a search must not return, as the nodes that are closed to it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from vllm_trie.catalog.arrays import catalog_level_starts
from vllm_trie.options.shown import shown_option_name
from vllm_trie.search.constraints.catalog import MOST_PLACES
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

TRUE = np.ones(1, np.bool_)


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
    def of(cls, catalog: Catalog, item_ids: np.ndarray) -> Self:
        """Exclude all sequences of some items.

        Args:
            item_ids: [n] int64, ascending, each once. Those that no item has are ignored.
        """
        ended, _ = catalog.nodes_of_items(item_ids)
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
    def of(cls, catalog: Catalog, item_ids: np.ndarray) -> Self:
        """Look ids [n] int64 up, each of which must be an item's.

        Raises:
            ValueError: one is not.
        """
        ids = np.sort(item_ids)
        if (ids[1:] == ids[:-1]).any():
            ids = np.unique(ids)
        ended, unknown = catalog.nodes_of_items(ids)
        if len(unknown):
            raise ValueError(f"{unknown[0]} is no item of this catalog; leave it out")
        nodes = _closed_nodes(catalog, ended)
        return cls(ids.tobytes(), catalog.digest, nodes.codes.tobytes(), nodes.most_together)

    @property
    def ids(self) -> np.ndarray:
        """[n] int64."""
        return np.frombuffer(self.item_ids, np.int64)

    def looked_up(self, digest: str) -> Exclusion:
        """What the front end has found, by the digest that it has."""
        return Exclusion(digest, NodeCodes(np.frombuffer(self.codes, np.int64), self.most_together))


def why_nothing_is_excluded(catalog: Catalog, num_items: int) -> str | None:
    """Why a search for so many items one after the other, `catalog_items`, can exclude none; None if it can."""
    most = MOST_PLACES // catalog.num_nodes
    if num_items <= most:
        return None
    return f"catalog_items={num_items} are too many where items are excluded; pass at most {most:,}"


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


def item_list_digest(ids: np.ndarray) -> str:
    """Of what `read_item_list` has read."""
    return hashlib.sha256(ids.tobytes()).hexdigest()


def exclusion_digest(catalog: Catalog, item_ids: np.ndarray) -> str:
    """By which what is closed is known, of ids [n] int64, ascending."""
    return hashlib.sha256(catalog.digest.encode() + item_ids.tobytes()).hexdigest()


def _closed_nodes(catalog: Catalog, ended: np.ndarray) -> NodeCodes:
    """What is closed where items end no more.

    A node is dead if no item ends there and all of its children are dead; so it goes from the leaves up. What is below
    a dead node is left out, as no search comes there. The root is never closed.

    Args:
        ended: What `Catalog.nodes_of_items` returns of these items.
    """
    first_child, is_item, parents = catalog.first_child, catalog.is_item, catalog.parents
    levels, most_together = [np.empty(0, np.int64)], 0
    shut = ended[:0], np.empty(0, np.int8)  # nodes of the next level up, all of whose children are dead
    for start in reversed(catalog_level_starts(first_child)[1:-1]):
        at = ended.searchsorted(start)
        ended, here = ended[:at], ended[at:]
        kinds = np.full(len(here), IS_CLOSED, np.int8)
        if first_child[start] < catalog.num_nodes:  # else all are leaves
            ending = np.flatnonzero(is_item.take(here))
            among = here.take(ending)
            kinds[ending.compress(first_child.take(among) < first_child.take(among + 1))] = NO_ITEM_ENDS
        nodes, kinds = _joined(here, kinds, *shut)
        if not len(nodes):
            continue
        own = parents.take(nodes)  # ascending, as nodes are
        bounds = np.flatnonzero(np.concatenate([TRUE, own[1:] != own[:-1], TRUE]))  # of the children of each parent
        first, num_closed = bounds[:-1], np.diff(bounds)
        above, low, high = own.take(first), nodes.take(first), nodes.take(bounds[1:] - 1)
        # All children of a parent are dead if none is missing between, and those next to them are others'. The last
        # node of all is followed by the root.
        is_shut = (num_closed == high - low + 1) & (above > 0)
        is_shut &= (parents.take(low - 1) != above) & (parents.take(high + 1, mode="wrap") != above)
        is_shut[first.searchsorted(np.flatnonzero(kinds != IS_CLOSED), side="right") - 1] = False
        above = above.compress(is_shut)
        ends = is_item.take(above)
        ends[ends] = ~_places_among(ended, above.compress(ends))[1]
        shut = above, np.where(ends, NO_WAY_ON, IS_CLOSED).astype(np.int8)
        is_dead = is_shut.copy()
        is_dead[is_shut] = ~ends
        first, num_below = first.compress(is_dead), num_closed.compress(is_dead)
        below = np.repeat(first - num_below.cumsum() + num_below, num_below) + np.arange(num_below.sum())
        levels.append(np.delete(nodes.astype(np.int64) << KIND_BITS | kinds, below))
        most_together = max(most_together, int(num_closed.compress(~is_dead).max(initial=0)))
    return NodeCodes(np.concatenate(levels[::-1]), most_together)


def _joined(
    nodes: np.ndarray, kinds: np.ndarray, others: np.ndarray, of_others: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Nodes [n], ascending, and what is closed at each [n], of two such pairs that may have nodes in common."""
    places, is_known = _places_among(nodes, others)
    kinds[places.compress(is_known)] |= of_others.compress(is_known)
    places, is_new = places.compress(~is_known), ~is_known
    return np.insert(nodes, places, others.compress(is_new)), np.insert(kinds, places, of_others.compress(is_new))


def _places_among(nodes: np.ndarray, some: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[n] where some nodes come among others, both ascending; [n] whether they are among these."""
    places = nodes.searchsorted(some)
    return places, np.append(nodes, nodes.dtype.type(-1)).take(places) == some
