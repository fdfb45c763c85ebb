"""The catalogs of one engine as its scheduler sees them: which searches use them, and what workers load and forget.

A set of items that comes with a request waits on the host, as bytes. It goes to the devices with the step that admits
its search. On each device, all tables of requests together may take `request_tables_bytes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np

from vllm_trie import catalog as catalog_files
from vllm_trie.catalog.store import CatalogStore, HeldTable
from vllm_trie.compat.patch import arguments_to_vllm, wraps_vllm
from vllm_trie.engine.catalog_exclusion import (
    Exclusion,
    SentExclusion,
    exclusion_digest,
    item_list_digest,
    read_item_list,
    why_nothing_is_excluded,
)
from vllm_trie.messages import CatalogChanges, GroupTicketMessage
from vllm_trie.options import BeamParams
from vllm_trie.search.constraints.catalog import ItemConstraint
from vllm_trie.search.stopping import NO_TOKEN

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

    from vllm_trie.catalog import Catalog
    from vllm_trie.search.unique_pools import ItemsOf
    from vllm_trie.trie.hypotheses import HypothesisTrie

MOST_IDLE = 32  # sets of requests that workers keep although no running search uses them
NO_LISTS: Mapping[str, str] = {}

Held = TypeVar("Held", bound=HeldTable)

LOAD_CATALOG = "load_catalog"  # a method of the workers, after which the engine loads the catalog, too
LOAD_ITEM_LIST = "load_item_list"  # handled by the engine only


@wraps_vllm("collective_rpc", "vllm.v1.engine.core:EngineCore")
def engine_loads_catalogs(
    original: Callable[..., list[Any]], self: EngineCore, method: Any, *args: Any, **kwargs: Any
) -> list[Any]:
    """Load a catalog or list into the scheduler as well as into the workers.

    A name stands for the new version once all workers have it; if any fails, it stands for the old one.
    """
    if method not in (LOAD_CATALOG, LOAD_ITEM_LIST):
        return original(self, method, *args, **kwargs)
    catalogs, asked = self.scheduler.catalogs, arguments_to_vllm(original, self, method, *args, **kwargs)["args"]
    name, path, digest = asked
    differs = f"{path} is not the same file for all processes; write a new file, and load that"
    if method == LOAD_ITEM_LIST:
        ids = read_item_list(path)
        if item_list_digest(ids) != digest:
            raise RuntimeError(differs)
        catalogs.lists[name] = ids
        return [digest]
    self.scheduler.wake()
    try:
        results = original(self, method, *args, **kwargs)
        if set(results) != {digest}:
            raise RuntimeError(f"catalog {differs}")
        catalog = catalog_files.Catalog.open(path)
        if catalog.digest != digest:
            raise RuntimeError(f"catalog {path} changed while it was loaded; write a new file, and load that")
        catalogs.name(name, catalog)
    except Exception:
        catalogs.take_back(digest)
        raise
    return results


def num_engine_beams_along(beam: BeamParams, num_items: int, num_stop_tokens: int) -> int:
    """How many different beams a catalog allows, at most `beam_width`.

    Args:
        num_items: Of the catalog.
        num_stop_tokens: Under `catalog_stop` one of them follows the last item.
    """
    if beam.catalog_after is not None:
        return beam.beam_width
    exponent = min(beam.catalog_items, beam.beam_width.bit_length())  # 2 to this power exceeds beam_width
    num_hypotheses = num_items**exponent * (num_stop_tokens if beam.catalog_stop else 1)
    return min(beam.beam_width, num_hypotheses * beam.num_beam_groups)


class CatalogCounts(NamedTuple):
    """The catalogs that workers hold."""

    items: int
    bytes: int  # on each device
    loads: int  # of files, so far


class NoGroupCatalog:
    """The interface of a search to its catalog, for a search without one."""

    constraints: tuple[ItemConstraint, ...] = ()
    brings: Mapping[Hashable, int] = {}
    excludes: str | None = None  # the digest of its `Exclusion`
    refusal: str | None = None  # why this version of the catalog does not allow the search

    def __init__(self, params: BeamParams) -> None:
        self.params = params

    def num_beams(self, num_stop_tokens: int) -> int:
        """How many different beams there can be."""
        return self.params.beam_width

    def num_ending(self, num_beams: int, num_stop_tokens: int) -> int | None:
        """`SearchRules.num_ending` of a search with so many beams."""
        return None

    def items_of(self, trie: HypothesisTrie, stop_token_ids: frozenset[int]) -> ItemsOf | None:
        """A function from leaves of a trie to their items, if each item counts once."""
        return None

    def answer(self, stop_token_ids: frozenset[int], sequences: Sequence[list[int]]) -> dict[str, Any]:
        """What the catalog adds to the answer, for hypotheses given by all their tokens."""
        return {}

    def release(self) -> None:
        """Release the catalog at the end of the search."""


class GroupCatalogUse(NoGroupCatalog):
    """The version of a catalog that one search uses from beginning to end.

    Args:
        brings: By digest, the bytes on each device of tables that came with the request.
        excludes: The digest of its `Exclusion`.
    """

    def __init__(
        self,
        params: BeamParams,
        catalog: Catalog,
        store: EngineCatalogs,
        brings: Mapping[Hashable, int],
        excludes: str | None,
    ) -> None:
        super().__init__(params)
        after = params.catalog_after
        assert not isinstance(after, str), "the front end has not looked up the token of catalog_after"
        counts = params.catalog_items, after, params.catalog_stop, params.catalog_renormalize
        self.rules = ItemConstraint(catalog.digest, *counts, excludes=excludes is not None)
        self.constraints = (self.rules,)
        self.brings, self.excludes = brings, excludes
        if excludes is not None and (why := why_nothing_is_excluded(catalog, params.catalog_items)):
            self.refusal = f"cannot use this version of its catalog: {why}"
        self._catalog, self._store = catalog, store

    def num_beams(self, num_stop_tokens: int) -> int:
        return num_engine_beams_along(self.params, self._catalog.num_items, num_stop_tokens)

    def num_ending(self, num_beams: int, num_stop_tokens: int) -> int | None:
        if not self.params.catalog_unique:
            return None
        from vllm_trie.engine.unique_catalog_items import num_engine_ending_along  # here: few searches need it

        return num_engine_ending_along(self.params, self._catalog, num_beams, num_stop_tokens)

    def items_of(self, trie: HypothesisTrie, stop_token_ids: frozenset[int]) -> ItemsOf | None:
        if not self.params.catalog_unique:
            return None
        from vllm_trie.engine.unique_catalog_items import GroupUniqueItems

        return GroupUniqueItems(trie, partial(self.item_ids, stop_token_ids)).of

    def answer(self, stop_token_ids: frozenset[int], sequences: Sequence[list[int]]) -> dict[str, Any]:
        return {"item_ids": self.item_ids(stop_token_ids, sequences).tolist()}

    def item_ids(self, stop_token_ids: frozenset[int], sequences: Sequence[list[int]]) -> np.ndarray:
        """[n] the items of hypotheses given by all their tokens; [n, items] if each has several; -1 for no item."""
        if (after := self.rules.after) is not None:
            sequences = [tokens[tokens.index(after) + 1 :] if after in tokens else [] for tokens in sequences]
        if not self.rules.ends_with_stop:
            return self._found(sequences)
        found = self._found(
            [tokens[:-1] if tokens and tokens[-1] in stop_token_ids else tokens for tokens in sequences]
        )
        # At max_tokens items need no stop token, and the last token of an item may be one.
        is_whole = (found == catalog_files.NO_ITEM).any(axis=tuple(range(1, found.ndim)))
        found[is_whole] = self._found([sequences[row] for row in np.flatnonzero(is_whole)])
        return found

    def release(self) -> None:
        for digest in filter(None, (self._catalog.digest, self.excludes)):
            self._store.release(digest)

    def _found(self, items: Sequence[list[int]]) -> np.ndarray:
        """[n] ids of items, or [n, items] if a hypothesis has several; -1 for none."""
        columns = np.array([*zip_longest(*items, fillvalue=NO_TOKEN)], np.int32)
        padded = columns.reshape(max(map(len, items), default=0), len(items)).T
        count = self.rules.num_items
        return self._catalog.find(padded) if count == 1 else self._catalog.find_in_a_row(padded, count)


class EngineCatalogs(CatalogStore):
    """All catalogs of an engine, the searches that use them, and which of them workers hold.

    In the next step workers forget catalogs that no search uses and no name stands for. Sets that came with requests
    stay as long as there is room.

    Args:
        paths: Files of catalogs, by name.
        room: Bytes on each device for the tables of requests: `request_tables_bytes`.
        lists: Files of items that requests may exclude, by name.
    """

    def __init__(self, paths: Mapping[str, str], room: int, lists: Mapping[str, str] = NO_LISTS) -> None:
        self.room = room
        self.lists = {name: read_item_list(path) for name, path in lists.items()}  # ids, ascending
        self._held = set[str]()  # digests of what workers hold
        self._sets = dict[str, None]()  # those of them that came with requests, the most recently needed last
        self._users: Counter[str] = Counter()  # searches by digest, waiting ones included
        self.changes: CatalogChanges | None = None  # what workers must do before the next step, if anything
        self._num_loads = 0
        self.has_news = False  # whether anything changed since `counts`
        super().__init__({name: catalog_files.Catalog.open(path) for name, path in paths.items()})

    def counts(self) -> CatalogCounts:
        """What workers hold now; clears `has_news`."""
        self.has_news, catalogs = False, [self.by_digest[digest] for digest in self._held]
        num_bytes = sum(catalog.num_bytes_on_device for catalog in catalogs)
        return CatalogCounts(sum(catalog.num_items for catalog in catalogs), num_bytes, self._num_loads)

    def name(self, name: str, catalog: Catalog) -> None:
        """Let a name stand for a catalog that the workers have loaded."""
        self._num_loads += 1
        super().name(name, catalog)

    def take_back(self, digest: str) -> None:
        """After a failed load: let workers forget a catalog, unless all of them had it before."""
        if digest not in self._held:
            self._to_change().gone[digest] = False

    def use(self, params: BeamParams, ticket: GroupTicketMessage) -> NoGroupCatalog:
        """The catalog of a new search: a name's present version, the set that came with its request, or none."""
        if ticket.item_set is not None:
            catalog = self._once(catalog_files.Catalog.from_bytes(ticket.item_set, checks=False))
            brings: dict[Hashable, int] = {catalog.digest: catalog.num_bytes_on_device}
        elif params.catalog is not None:
            catalog, brings = self[params.catalog], {}
        else:
            return NoGroupCatalog(params)
        self._users[catalog.digest] += 1
        if (exclusion := self._exclusion(params, ticket, catalog)) is None:
            return GroupCatalogUse(params, catalog, self, brings, None)
        exclusion = self._once(exclusion)
        self._users[exclusion.digest] += 1
        brings[exclusion.digest] = exclusion.num_bytes_on_device
        return GroupCatalogUse(params, catalog, self, brings, exclusion.digest)

    def _once(self, table: Held) -> Held:
        """This table, or an equal one that is known: equal tables are held once."""
        return cast(Held, self.by_digest.setdefault(table.digest, table))

    def _exclusion(self, params: BeamParams, ticket: GroupTicketMessage, catalog: Catalog) -> Exclusion | None:
        """What a new search excludes: its own items, and the present version of the list that it names."""
        listed = None if params.exclude_list is None else self.lists[params.exclude_list]
        sent = None if ticket.exclusion is None else SentExclusion(**ticket.exclusion)
        if sent is None and listed is None:
            return None
        parts = [ids for ids in (listed, None if sent is None else sent.ids) if ids is not None]
        ids = parts[0] if len(parts) == 1 else np.union1d(*parts)
        digest = exclusion_digest(catalog, ids)
        if isinstance(known := self.by_digest.get(digest), Exclusion):
            return known
        if sent is not None and listed is None and sent.catalog == catalog.digest:
            return sent.looked_up(digest)
        return Exclusion.of(catalog, ids)

    def release(self, digest: str) -> None:
        """Count a search less for this table, and drop the table if nothing needs it."""
        self._users[digest] -= 1
        self.drop_unused(digest)

    def has_room(self, brought: Mapping[Hashable, int]) -> bool:
        """Whether these tables of requests, sizes in bytes by key, fit on a device together."""
        return self._num_bytes(brought) <= self.room

    def load(self, brought: Mapping[Hashable, int]) -> None:
        """Let workers load the sets of running searches with the next step, in place of idle ones if necessary."""
        needed = [key for key in brought if isinstance(key, str)]
        for digest in needed:
            if digest in self._sets or digest not in self._held:
                self._sets.pop(digest, None)
                self._sets[digest] = None
        spare, num_idle = self.room - self._num_bytes(brought), 0
        for digest in [digest for digest in reversed(self._sets) if digest not in brought]:
            num_bytes = self.by_digest[digest].num_bytes_on_device
            if num_bytes > spare or num_idle == MOST_IDLE:
                self._unload(digest)
            else:
                spare, num_idle = spare - num_bytes, num_idle + 1
        for digest in needed:
            if digest not in self._held:
                self._held.add(digest)
                self.has_news = True
                changes = self._to_change()
                if not changes.gone.pop(digest, False):  # else all workers still have it
                    table = self.by_digest[digest]
                    if isinstance(table, Exclusion):
                        changes.closed[digest] = table.nodes
                    else:
                        changes.new[digest] = cast("Catalog", table).to_bytes()

    def take_changes(self) -> CatalogChanges:
        """Take the changes that workers make before the next step."""
        changes, self.changes = self._to_change(), None
        return changes

    def _to_change(self) -> CatalogChanges:
        self.changes = self.changes or CatalogChanges()
        return self.changes

    def add(self, catalog: Catalog) -> None:
        """Record a catalog that workers have loaded for a name."""
        super().add(catalog)
        if self.lists:  # searches look them up when they begin
            catalog.index_ids()
        self._held.add(catalog.digest)
        self._sets.pop(catalog.digest, None)
        if self.changes is not None:
            self.changes.gone.pop(catalog.digest, None)
        self.has_news = True

    def drop_unused(self, digest: str) -> bool:
        if is_gone := super().drop_unused(digest):
            del self._users[digest]
            self._forget(digest)
        return is_gone

    def is_needed(self, digest: str) -> bool:
        return bool(self._users[digest]) or digest in self._sets or super().is_needed(digest)

    def check_invariants(self, brought: Mapping[Hashable, int]) -> None:
        """Raise AssertionError unless workers hold the sets of running searches, within the room."""
        assert {key for key in brought if isinstance(key, str)} <= self._held, "a search runs without its set"
        assert self._sets.keys() <= self._held <= self.by_digest.keys()
        idle: dict[Hashable, int] = {digest: self.by_digest[digest].num_bytes_on_device for digest in self._sets}
        assert self._num_bytes({**idle, **brought}) <= self.room, "what requests bring takes more than its room"

    def _num_bytes(self, brought: Mapping[Hashable, int]) -> int:
        """Their bytes, without those of catalogs that workers hold for a name."""
        return sum(size for key, size in brought.items() if key in self._sets or key not in self._held)

    def _unload(self, digest: str) -> None:
        """Let workers forget a set; if waiting searches use it, it is loaded again when they are admitted."""
        del self._sets[digest]
        if not self.drop_unused(digest):
            self._forget(digest)

    def _forget(self, digest: str) -> None:
        if digest in self._held:
            self._held.discard(digest)
            self._to_change().gone[digest] = True
            self.has_news = True
