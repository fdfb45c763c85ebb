"""The catalogs of one engine as its scheduler sees them: named ones, and sets that came with requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm_trie.catalog import NO_ITEM, Catalog
from vllm_trie.compat.patch import Patch, arguments
from vllm_trie.messages import CatalogChanges
from vllm_trie.search.constraints.catalog import ItemRules

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

NO_TOKEN = -1
# Sets of requests that are kept on the device while nobody uses them.
MOST_INLINE, MOST_INLINE_BYTES = 32, 64 << 20


LOAD_CATALOG = "load_catalog"  # the workers' method, and what the engine does beside them

collective_rpc = Patch("vllm.v1.engine.core:EngineCore", "collective_rpc")


def take_new_catalogs() -> None:
    """From now on, the scheduler of an engine in this process knows what its workers are told to load."""
    collective_rpc.wrap(_load)


def _load(original: Callable[..., list[Any]], self: EngineCore, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """A name stands for a new version once all workers have it, and for the old one if any of them has not."""
    if method != LOAD_CATALOG:
        return original(self, method, *args, **kwargs)
    catalogs = self.scheduler.catalogs
    name, path, digest = arguments(original, self, method, *args, **kwargs)["args"]
    try:
        results = original(self, method, *args, **kwargs)
        if set(results) != {digest}:
            raise RuntimeError(f"catalog {path} is not the same to all who load it; write a new file, and load that")
        catalogs.load(name, path, digest)
    except Exception:
        catalogs.take_back(digest)
        raise
    return results


class CatalogCounts(NamedTuple):
    """What workers hold."""

    items: int
    bytes: int  # on each device
    loads: int  # of named ones, so far


class EngineCatalogs:
    """Which catalogs there are, and who uses them.

    A search goes on with the version that it began with. What nobody uses any more, and no name stands for, leaves the
    workers with the next step.

    Args:
        paths: Files, by name.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._num_loads = 0
        self._names: dict[str, str] = {}  # digests
        self._catalogs: dict[str, Catalog] = {}  # by digest
        self._inline: list[str] = []  # digests of sets that came with requests, the one that was used last at the end
        self._users: Counter[str] = Counter()
        self._changes = CatalogChanges()
        self.has_news = False  # since `counts`
        for name, path in paths.items():
            self.load(name, path)

    def counts(self) -> CatalogCounts:
        """What there is now, as it was reported."""
        self.has_news, catalogs = False, self._catalogs.values()
        num_bytes = sum(catalog.num_bytes_on_device for catalog in catalogs)
        return CatalogCounts(sum(catalog.num_items for catalog in catalogs), num_bytes, self._num_loads)

    def load(self, name: str, path: str, digest: str | None = None) -> None:
        """Let a name stand for a file from now on, which the workers have loaded.

        Args:
            digest: What they have loaded; None before they have begun.

        Raises:
            RuntimeError: the file has changed since then.
        """
        old, catalog = self._names.get(name), Catalog.open(path)
        if digest not in (None, catalog.digest):
            raise RuntimeError(f"catalog {path} changed while it was loaded; write a new file, and load that")
        self._add(catalog)
        self._names[name] = catalog.digest
        self._num_loads += 1
        self.has_news = True
        if old is not None:
            self._drop_unused(old)

    def take_back(self, digest: str) -> None:
        """Some workers may have loaded this, and others not: let them forget it, unless all of them have it anyway."""
        if digest not in self._catalogs:
            self._changes.gone[digest] = False

    def acquire(self, name: str | None, content: bytes | None) -> str:
        """Digest of the catalog that a new search goes along: a name's present one, or what came with the request."""
        if content is None:
            assert name is not None
            digest = self._names[name]
        else:
            catalog = Catalog.from_bytes(content)
            digest = catalog.digest
            if digest not in self._catalogs and not self._add(catalog):
                self._changes.new[digest] = content
            if digest in self._inline:
                self._inline.remove(digest)
            self._inline.append(digest)
        self._users[digest] += 1
        return digest

    def num_items(self, digest: str) -> int:
        """Of a catalog that a search goes along."""
        return self._catalogs[digest].num_items

    def release(self, digest: str) -> None:
        """A search is over."""
        self._users[digest] -= 1
        while len(self._inline) > MOST_INLINE or self._num_inline_bytes() > MOST_INLINE_BYTES:
            self._drop_unused(self._inline.pop(0))
        self._drop_unused(digest)

    def take_changes(self) -> CatalogChanges:
        """What workers must do before the next step."""
        changes, self._changes = self._changes, CatalogChanges()
        return changes

    def item_ids(self, rules: ItemRules, stops: tuple[int, ...], sequences: Sequence[list[int]]) -> list[Any]:
        """The items of some hypotheses: of each its id, or a list of them where there are several.

        Args:
            rules: How they went along the catalog.
            stops: Stop tokens.
            sequences: All tokens of each.
        """
        if rules.after is not None:
            sequences = [tokens[tokens.index(rules.after) + 1 :] for tokens in sequences]
        if not rules.ends_with_stop:
            return list(self._found(rules, sequences).tolist())
        found = self._found(rules, [tokens[:-1] if tokens[-1] in stops else tokens for tokens in sequences])
        # At max_tokens items need no stop, and their own last token may be one.
        is_whole = (found == NO_ITEM).any(axis=tuple(range(1, found.ndim)))
        found[is_whole] = self._found(rules, [sequences[row] for row in np.flatnonzero(is_whole)])
        return list(found.tolist())

    def _found(self, rules: ItemRules, items: Sequence[list[int]]) -> np.ndarray:
        """[n] ids of items, or [n, items] where several come one after the other; -1 where there is none."""
        padded = np.full((len(items), max(map(len, items), default=0)), NO_TOKEN, np.int32)
        for row, tokens in zip(padded, items, strict=True):
            row[: len(tokens)] = tokens
        catalog = self._catalogs[rules.catalog]
        return catalog.find(padded) if rules.num_items == 1 else catalog.find_in_a_row(padded, rules.num_items)

    def _add(self, catalog: Catalog) -> bool:
        """Know a catalog. Returns whether workers were about to forget it, and now are not."""
        self._catalogs[catalog.digest] = catalog
        self.has_news = True
        return self._changes.gone.pop(catalog.digest, False)

    def _num_inline_bytes(self) -> int:
        return sum(self._catalogs[digest].num_bytes_on_device for digest in self._inline)

    def _drop_unused(self, digest: str) -> None:
        is_kept = self._users[digest] or digest in self._inline or digest in self._names.values()
        if not is_kept and digest in self._catalogs:
            del self._catalogs[digest], self._users[digest]
            self.has_news = True
            if self._changes.new.pop(digest, None) is None:  # else no worker has it yet
                self._changes.gone[digest] = True
