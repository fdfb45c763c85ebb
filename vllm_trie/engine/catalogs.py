"""The catalogs of one engine as its scheduler sees them: who uses which, and what workers must do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm_trie.catalog import NO_ITEM, Catalog, CatalogStore
from vllm_trie.compat.patch import arguments, wraps
from vllm_trie.messages import CatalogChanges
from vllm_trie.options import BeamParams
from vllm_trie.options.items import num_beams_along
from vllm_trie.search.constraints.catalog import ItemRules

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

NO_TOKEN = -1
# Sets of requests that are kept on the device while nobody uses them.
MOST_INLINE, MOST_INLINE_BYTES = 32, 64 << 20

LOAD_CATALOG = "load_catalog"  # the workers' method, and what the engine does beside them


@wraps("collective_rpc", "vllm.v1.engine.core:EngineCore")
def load(original: Callable[..., list[Any]], self: EngineCore, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """The scheduler knows what its workers are told to load.

    A name stands for a new version once all workers have it, and for the old one if any of them has not.
    """
    if method != LOAD_CATALOG:
        return original(self, method, *args, **kwargs)
    catalogs = self.scheduler.catalogs
    name, path, digest = arguments(original, self, method, *args, **kwargs)["args"]
    try:
        results = original(self, method, *args, **kwargs)
        if set(results) != {digest}:
            raise RuntimeError(f"catalog {path} is not the same to all who load it; write a new file, and load that")
        catalog = Catalog.open(path)
        if catalog.digest != digest:
            raise RuntimeError(f"catalog {path} changed while it was loaded; write a new file, and load that")
        catalogs.name(name, catalog)
    except Exception:
        catalogs.take_back(digest)
        raise
    return results


class CatalogCounts(NamedTuple):
    """What workers hold."""

    items: int
    bytes: int  # on each device
    loads: int  # of named ones, so far


class NoCatalog:
    """What a search without a catalog has in its place."""

    constraints: tuple[ItemRules, ...] = ()

    def __init__(self, params: BeamParams) -> None:
        self.params = params

    def num_beams(self, num_stop_tokens: int) -> int:
        """How many beams can live."""
        return self.params.beam_width

    def answer(self, stop_token_ids: tuple[int, ...], sequences: Sequence[list[int]]) -> dict[str, Any]:
        """What to say of hypotheses besides, all tokens of each given."""
        return {}

    def release(self) -> None:
        """The search is over."""


class CatalogUse(NoCatalog):
    """The catalog along which one search goes: the version that it began with."""

    def __init__(self, params: BeamParams, catalog: Catalog, store: EngineCatalogs) -> None:
        super().__init__(params)
        after = params.catalog_after
        assert not isinstance(after, str), "the front end has not looked up the token of catalog_after"
        counts = params.catalog_items, after, params.catalog_stop, params.catalog_renormalize
        self.rules = ItemRules(catalog.digest, *counts)
        self.constraints = (self.rules,)
        self._catalog, self._store = catalog, store

    def num_beams(self, num_stop_tokens: int) -> int:
        return num_beams_along(self.params, self._catalog.num_items, num_stop_tokens)

    def answer(self, stop_token_ids: tuple[int, ...], sequences: Sequence[list[int]]) -> dict[str, Any]:
        """The items of hypotheses: of each its id, or a list of them where there are several."""
        if (after := self.rules.after) is not None:
            sequences = [tokens[tokens.index(after) + 1 :] for tokens in sequences]
        if not self.rules.ends_with_stop:
            return {"item_ids": self._found(sequences).tolist()}
        found = self._found([tokens[:-1] if tokens[-1] in stop_token_ids else tokens for tokens in sequences])
        # At max_tokens items need no stop, and their own last token may be one.
        is_whole = (found == NO_ITEM).any(axis=tuple(range(1, found.ndim)))
        found[is_whole] = self._found([sequences[row] for row in np.flatnonzero(is_whole)])
        return {"item_ids": found.tolist()}

    def release(self) -> None:
        self._store.release(self._catalog.digest)

    def _found(self, items: Sequence[list[int]]) -> np.ndarray:
        """[n] ids of items, or [n, items] where several come one after the other; -1 where there is none."""
        columns = np.array([*zip_longest(*items, fillvalue=NO_TOKEN)], np.int32)
        padded = columns.reshape(max(map(len, items), default=0), len(items)).T
        count = self.rules.num_items
        return self._catalog.find(padded) if count == 1 else self._catalog.find_in_a_row(padded, count)


class EngineCatalogs(CatalogStore):
    """Which catalogs there are, and who uses them.

    What nobody uses any more, and no name stands for, leaves the workers with the next step. Sets that came with
    requests stay for a while.

    Args:
        paths: Files, by name.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._inline = dict[str, None]()  # digests of sets that came with requests, the one that was used last at last
        self._users: Counter[str] = Counter()
        self._changes = CatalogChanges()
        self._num_loads = 0
        self.has_news = False  # since `counts`
        super().__init__({name: Catalog.open(path) for name, path in paths.items()})

    def counts(self) -> CatalogCounts:
        """What there is now, as it was reported."""
        self.has_news, catalogs = False, self.by_digest.values()
        num_bytes = sum(catalog.num_bytes_on_device for catalog in catalogs)
        return CatalogCounts(sum(catalog.num_items for catalog in catalogs), num_bytes, self._num_loads)

    def name(self, name: str, catalog: Catalog) -> None:
        """Let a name stand for what the workers have loaded."""
        self._num_loads += 1
        super().name(name, catalog)

    def take_back(self, digest: str) -> None:
        """Some workers may have loaded this, and others not: let them forget it, unless all of them have it anyway."""
        if digest not in self.by_digest:
            self._changes.gone[digest] = False

    def use(self, params: BeamParams, item_set: bytes | None) -> NoCatalog:
        """What a new search goes along: a name's present catalog, what came with its request, or none."""
        if item_set is not None:
            catalog = Catalog.from_bytes(item_set)
            if catalog.digest not in self.by_digest and not self._changes.gone.get(catalog.digest):
                self._changes.new[catalog.digest] = item_set
            self.add(catalog)
            self._inline.pop(catalog.digest, None)
            self._inline[catalog.digest] = None
        elif params.catalog is not None:
            catalog = self[params.catalog]
        else:
            return NoCatalog(params)
        self._users[catalog.digest] += 1
        return CatalogUse(params, catalog, self)

    def release(self, digest: str) -> None:
        """A search is over."""
        self._users[digest] -= 1
        while len(self._inline) > MOST_INLINE or self._num_inline_bytes() > MOST_INLINE_BYTES:
            oldest = next(iter(self._inline))
            del self._inline[oldest]
            self.drop_unused(oldest)
        self.drop_unused(digest)

    def take_changes(self) -> CatalogChanges:
        """What workers must do before the next step."""
        changes, self._changes = self._changes, CatalogChanges()
        return changes

    def add(self, catalog: Catalog) -> None:
        super().add(catalog)
        self._changes.gone.pop(catalog.digest, None)
        self.has_news = True

    def drop_unused(self, digest: str) -> bool:
        if is_gone := super().drop_unused(digest):
            del self._users[digest]
            self.has_news = True
            if self._changes.new.pop(digest, None) is None:  # else no worker has it yet
                self._changes.gone[digest] = True
        return is_gone

    def is_needed(self, digest: str) -> bool:
        return bool(self._users[digest]) or digest in self._inline or super().is_needed(digest)

    def _num_inline_bytes(self) -> int:
        return sum(self.by_digest[digest].num_bytes_on_device for digest in self._inline)
