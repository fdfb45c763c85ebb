"""The catalogs of one engine as its scheduler sees them: who uses which, and what workers must do about it.

A set that comes with a request waits on the host, in the bytes that came. It goes to the devices with the step that
admits its search. There all that comes with requests has a room of so many bytes.
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

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

    from vllm_trie.catalog import Catalog
    from vllm_trie.search.unique_pools import ItemsOf
    from vllm_trie.trie.hypotheses import HypothesisTrie

NO_TOKEN = -1
MOST_IDLE = 32  # sets of requests that workers keep while no search runs along them
NO_LISTS: Mapping[str, str] = {}

Held = TypeVar("Held", bound=HeldTable)

LOAD_CATALOG = "load_catalog"  # the workers' method, and what the engine does beside them
LOAD_ITEM_LIST = "load_item_list"  # what the engine does alone


@wraps_vllm("collective_rpc", "vllm.v1.engine.core:EngineCore")
def engine_loads_catalogs(
    original: Callable[..., list[Any]], self: EngineCore, method: Any, *args: Any, **kwargs: Any
) -> list[Any]:
    """The scheduler knows what its workers are told to load.

    A name stands for a new version once all workers have it, and for the old one if any of them has not.
    """
    if method not in (LOAD_CATALOG, LOAD_ITEM_LIST):
        return original(self, method, *args, **kwargs)
    catalogs, asked = self.scheduler.catalogs, arguments_to_vllm(original, self, method, *args, **kwargs)["args"]
    name, path, digest = asked
    differs = f"{path} is not the same to all who load it; write a new file, and load that"
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
    """How many beams can live along a catalog, at most `beam_width`: no two of a group are alike.

    Args:
        num_items: Of the catalog.
        num_stop_tokens: Under `catalog_stop` one of them follows the last item.
    """
    if beam.catalog_after is not None:
        return beam.beam_width
    exponent = min(beam.catalog_items, beam.beam_width.bit_length())  # with which 2 exceeds beam_width
    num_hypotheses = num_items**exponent * (num_stop_tokens if beam.catalog_stop else 1)
    return min(beam.beam_width, num_hypotheses * beam.num_beam_groups)


class CatalogCounts(NamedTuple):
    """What workers hold."""

    items: int
    bytes: int  # on each device
    loads: int  # of named ones, so far


class NoGroupCatalog:
    """What a search without a catalog has in its place."""

    constraints: tuple[ItemConstraint, ...] = ()
    brings: Mapping[Hashable, int] = {}
    excludes: str | None = None  # the digest of what is closed to it
    refusal: str | None = None  # why the search cannot go along this version

    def __init__(self, params: BeamParams) -> None:
        self.params = params

    def num_beams(self, num_stop_tokens: int) -> int:
        """How many beams can live."""
        return self.params.beam_width

    def num_ending(self, num_beams: int, num_stop_tokens: int) -> int | None:
        """See `SearchRules`, of so many beams."""
        return None

    def items_of(self, trie: HypothesisTrie, stop_token_ids: frozenset[int]) -> ItemsOf | None:
        """Which items the hypotheses in a trie are, if each item counts once."""
        return None

    def answer(self, stop_token_ids: frozenset[int], sequences: Sequence[list[int]]) -> dict[str, Any]:
        """What to say of hypotheses besides, all tokens of each given."""
        return {}

    def release(self) -> None:
        """The search is over."""


class GroupCatalogUse(NoGroupCatalog):
    """The catalog along which one search goes: the version that it began with.

    Args:
        brings: By digest, the bytes that it takes on each device if it came with the request.
        excludes: The digest of what is closed to it.
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
            self.refusal = f"goes along a version of its catalog for which {why}"
        self._catalog, self._store = catalog, store

    def num_beams(self, num_stop_tokens: int) -> int:
        return num_engine_beams_along(self.params, self._catalog.num_items, num_stop_tokens)

    def num_ending(self, num_beams: int, num_stop_tokens: int) -> int | None:
        if not self.params.catalog_unique:
            return None
        from vllm_trie.engine.unique_catalog_items import num_engine_ending_along  # which few searches need

        return num_engine_ending_along(self.params, self._catalog, num_beams, num_stop_tokens)

    def items_of(self, trie: HypothesisTrie, stop_token_ids: frozenset[int]) -> ItemsOf | None:
        if not self.params.catalog_unique:
            return None
        from vllm_trie.engine.unique_catalog_items import GroupUniqueItems

        return GroupUniqueItems(trie, partial(self.item_ids, stop_token_ids)).of

    def answer(self, stop_token_ids: frozenset[int], sequences: Sequence[list[int]]) -> dict[str, Any]:
        return {"item_ids": self.item_ids(stop_token_ids, sequences).tolist()}

    def item_ids(self, stop_token_ids: frozenset[int], sequences: Sequence[list[int]]) -> np.ndarray:
        """[n] the items of hypotheses, all tokens of each given; [n, items] where each has several; -1 for no item."""
        if (after := self.rules.after) is not None:
            sequences = [tokens[tokens.index(after) + 1 :] if after in tokens else [] for tokens in sequences]
        if not self.rules.ends_with_stop:
            return self._found(sequences)
        found = self._found(
            [tokens[:-1] if tokens and tokens[-1] in stop_token_ids else tokens for tokens in sequences]
        )
        # At max_tokens items need no stop, and their own last token may be one.
        is_whole = (found == catalog_files.NO_ITEM).any(axis=tuple(range(1, found.ndim)))
        found[is_whole] = self._found([sequences[row] for row in np.flatnonzero(is_whole)])
        return found

    def release(self) -> None:
        for digest in filter(None, (self._catalog.digest, self.excludes)):
            self._store.release(digest)

    def _found(self, items: Sequence[list[int]]) -> np.ndarray:
        """[n] ids of items, or [n, items] where several come one after the other; -1 where there is none."""
        columns = np.array([*zip_longest(*items, fillvalue=NO_TOKEN)], np.int32)
        padded = columns.reshape(max(map(len, items), default=0), len(items)).T
        count = self.rules.num_items
        return self._catalog.find(padded) if count == 1 else self._catalog.find_in_a_row(padded, count)


class EngineCatalogs(CatalogStore):
    """Which catalogs there are, who uses them, and which of them workers hold.

    What no search uses, and no name stands for, leaves the workers with the next step. Sets that came with requests
    stay as long as there is room.

    Args:
        paths: Files, by name.
        room: Bytes on each device for what comes with requests: `request_tables_bytes`.
        lists: Files of items that requests may exclude, likewise.
    """

    def __init__(self, paths: Mapping[str, str], room: int, lists: Mapping[str, str] = NO_LISTS) -> None:
        self._room = room
        self.lists = {name: read_item_list(path) for name, path in lists.items()}  # ids, ascending
        self._held = set[str]()  # digests of what workers hold
        self._sets = dict[str, None]()  # of these, those that came with requests; what was needed last is at the end
        self._users: Counter[str] = Counter()  # searches, those that wait among them
        self.changes: CatalogChanges | None = None  # what workers must do before the next step, if anything
        self._num_loads = 0
        self.has_news = False  # since `counts`
        super().__init__({name: catalog_files.Catalog.open(path) for name, path in paths.items()})

    def counts(self) -> CatalogCounts:
        """What workers hold now, as it was reported."""
        self.has_news, catalogs = False, [self.by_digest[digest] for digest in self._held]
        num_bytes = sum(catalog.num_bytes_on_device for catalog in catalogs)
        return CatalogCounts(sum(catalog.num_items for catalog in catalogs), num_bytes, self._num_loads)

    def name(self, name: str, catalog: Catalog) -> None:
        """Let a name stand for what the workers have loaded."""
        self._num_loads += 1
        super().name(name, catalog)

    def take_back(self, digest: str) -> None:
        """Some workers may have loaded this, and others not: let them forget it, unless all of them have it anyway."""
        if digest not in self._held:
            self._to_change().gone[digest] = False

    def use(self, params: BeamParams, ticket: GroupTicketMessage) -> NoGroupCatalog:
        """What a new search goes along: a name's present catalog, what came with its request, or none."""
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
        """This, or what is equal to it: the bytes of equal sets are held once."""
        return cast(Held, self.by_digest.setdefault(table.digest, table))

    def _exclusion(self, params: BeamParams, ticket: GroupTicketMessage, catalog: Catalog) -> Exclusion | None:
        """What a new search must not come to, by the present version of the list that it names, if it does."""
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
        """A search is over."""
        self._users[digest] -= 1
        self.drop_unused(digest)

    @property
    def room(self) -> int:
        """Bytes on each device for what comes with requests."""
        return self._room

    def has_room(self, brought: Mapping[Hashable, int]) -> bool:
        """Whether all that searches bring fits on a device: bytes by what it is, equal things once."""
        return self._num_bytes(brought) <= self._room

    def load(self, brought: Mapping[Hashable, int]) -> None:
        """Let workers have the sets among what running searches bring, from the next step on, instead of idle ones."""
        needed = [key for key in brought if isinstance(key, str)]
        for digest in needed:
            if digest in self._sets or digest not in self._held:
                self._sets.pop(digest, None)
                self._sets[digest] = None
        spare, num_idle = self._room - self._num_bytes(brought), 0
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
                if not changes.gone.pop(digest, False):  # else all workers have it still
                    table = self.by_digest[digest]
                    if isinstance(table, Exclusion):
                        changes.closed[digest] = table.nodes
                    else:
                        changes.new[digest] = cast("Catalog", table).to_bytes()

    def take_changes(self) -> CatalogChanges:
        """What workers must do before the next step; they do it."""
        changes, self.changes = self._to_change(), None
        return changes

    def _to_change(self) -> CatalogChanges:
        self.changes = self.changes or CatalogChanges()
        return self.changes

    def add(self, catalog: Catalog) -> None:
        """Know what workers have loaded for a name."""
        super().add(catalog)
        if self.lists:  # which are looked up where searches begin
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
        """Raise AssertionError unless workers hold the sets of running searches, and no more than there is room for."""
        assert {key for key in brought if isinstance(key, str)} <= self._held, "a search runs without its set"
        assert self._sets.keys() <= self._held <= self.by_digest.keys()
        idle: dict[Hashable, int] = {digest: self.by_digest[digest].num_bytes_on_device for digest in self._sets}
        assert self._num_bytes({**idle, **brought}) <= self._room, "what requests bring takes more than its room"

    def _num_bytes(self, brought: Mapping[Hashable, int]) -> int:
        """Without what workers hold anyway, as a name stands for it, or did."""
        return sum(size for key, size in brought.items() if key in self._sets or key not in self._held)

    def _unload(self, digest: str) -> None:
        """Let workers forget a set. Searches along it that wait have it loaded again."""
        del self._sets[digest]
        if not self.drop_unused(digest):
            self._forget(digest)

    def _forget(self, digest: str) -> None:
        if digest in self._held:
            self._held.discard(digest)
            self._to_change().gone[digest] = True
            self.has_news = True
