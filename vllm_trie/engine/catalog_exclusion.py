"""Turns items that a search must not return into closed nodes of a catalog; used by front end and scheduler."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from vllm_trie.catalog.arrays import catalog_level_starts
from vllm_trie.options.shown import shown_option
from vllm_trie.search import search_spans
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
    """The nodes that are closed to a search in one version of a catalog.

    Args:
        digest: Equal for equal exclusions.
        nodes: The table that a device looks up.
    """

    digest: str
    nodes: NodeCodes
    num_items = 0  # items that it adds to a device: none

    @classmethod
    def of(cls, catalog: Catalog, item_ids: np.ndarray) -> Self:
        """Exclude items, with all their sequences.

        Args:
            item_ids: [n] int64, ascending, each once. Those that no item has are ignored.
        """
        ended, _ = catalog.nodes_of_items(item_ids)
        return cls(exclusion_digest(catalog, item_ids), _closed_nodes(catalog, ended))

    @property
    def num_bytes_on_device(self) -> int:
        """Its bytes in `ClosedNodes`, twice as many as the table since that grows by doubling."""
        codes = self.nodes.codes
        return 2 * codes.itemsize * PART * (len(codes) // PART + 1)


@dataclass(frozen=True)
class SentExclusion:
    """The items that a request must not return, as the front end sends them to the engine.

    Args:
        item_ids: [n] int64 in bytes, ascending, each once.
        catalog: The digest of the catalog version in which the front end has looked them up.
        codes: [m] int64 in bytes; with `most_together` the `NodeCodes` in that version.
    """

    item_ids: bytes
    catalog: str
    codes: bytes
    most_together: int

    @classmethod
    def of(cls, catalog: Catalog, item_ids: np.ndarray) -> Self:
        """Look up ids [n] int64, ascending, each once, in a catalog.

        Raises:
            ValueError: an id is not of an item of the catalog.
        """
        ended, unknown = catalog.nodes_of_items(item_ids)
        if len(unknown):
            others = f", nor are {len(unknown) - 1:,} more of these ids" if len(unknown) > 1 else ""
            raise ValueError(f"{unknown[0]} is not an item of this catalog{others}; leave out what it does not have")
        nodes = _closed_nodes(catalog, ended)
        return cls(item_ids.tobytes(), catalog.digest, nodes.codes.tobytes(), nodes.most_together)

    @property
    def ids(self) -> np.ndarray:
        """The item ids, [n] int64."""
        return np.frombuffer(self.item_ids, np.int64)

    def looked_up(self, digest: str) -> Exclusion:
        """The nodes that the front end has found, under this digest."""
        return Exclusion(digest, NodeCodes(np.frombuffer(self.codes, np.int64), self.most_together))


def why_nothing_is_excluded(catalog: Catalog, num_items: int) -> str | None:
    """Why a search with this `catalog_items` cannot exclude items; None if it can."""
    most = MOST_PLACES // catalog.num_nodes
    if num_items <= most:
        return None
    return f"catalog_items={num_items} is too many for a search that excludes items; pass at most {most:,}"


def read_item_list(path: str) -> np.ndarray:
    """Read ids [n] int64, ascending, each once, from a file with one per line; blank lines are skipped.

    Raises:
        ValueError: the file cannot be read, or a line is not an id.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; pass a file with one item id per line") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; write one item id per line") from None
    try:
        return np.unique(np.array(text.split(), np.int64))
    except (ValueError, OverflowError):
        number, line = next((n, line) for n, line in enumerate(text.splitlines(), 1) if not _are_ids(line))
        raise ValueError(
            f"{path}, line {number}: {shown_option(line)} is not an item's id; write one integer of 64 bits per line"
        ) from None


def _are_ids(line: str) -> bool:
    try:
        return all(-1 << 63 <= int(word) < 1 << 63 for word in line.split())
    except ValueError:
        return False


def item_list_digest(ids: np.ndarray) -> str:
    """SHA-256 of ids that `read_item_list` has read."""
    return hashlib.sha256(ids.tobytes()).hexdigest()


def exclusion_digest(catalog: Catalog, item_ids: np.ndarray) -> str:
    """The digest of an `Exclusion` of ids [n] int64, ascending."""
    return hashlib.sha256(catalog.digest.encode() + item_ids.tobytes()).hexdigest()


def _closed_nodes(catalog: Catalog, ended: np.ndarray) -> NodeCodes:
    """The nodes to close so that no hypothesis ends as one of some items.

    A node is dead if no item ends at it and all of its children are dead, so nodes are processed from the leaves up.
    Nodes below a dead node are left out, as no search reaches them. The root is never closed.

    Args:
        ended: The nodes of these items, from `Catalog.nodes_of_items`.
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
        # All children of a parent are closed if no number is missing among them and the nodes before and after them
        # have other parents. After the last node of all comes the root.
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
        levels.append(np.delete(nodes.astype(np.int64) << KIND_BITS | kinds, search_spans(first, num_below)))
        most_together = max(most_together, int(num_closed.compress(~is_dead).max(initial=0)))
    return NodeCodes(np.concatenate(levels[::-1]), most_together)


def _joined(
    nodes: np.ndarray, kinds: np.ndarray, others: np.ndarray, of_others: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Merge two lists of nodes, ascending, with the bits of what is closed at each; common nodes get both bits."""
    places, is_known = _places_among(nodes, others)
    kinds[places.compress(is_known)] |= of_others.compress(is_known)
    places, is_new = places.compress(~is_known), ~is_known
    return np.insert(nodes, places, others.compress(is_new)), np.insert(kinds, places, of_others.compress(is_new))


def _places_among(nodes: np.ndarray, some: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[n] the places of some nodes among others, both ascending, and [n] whether they are among these."""
    places = nodes.searchsorted(some)
    return places, np.append(nodes, nodes.dtype.type(-1)).take(places) == some
