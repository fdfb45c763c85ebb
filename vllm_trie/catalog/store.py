"""The catalogs of one engine, as each process that looks items up knows them: its front ends, and its scheduler."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vllm_trie.catalog.catalog import Catalog


class HeldTable(Protocol):
    """What devices look up for searches: a catalog, or what is closed to a search along one."""

    @property
    def digest(self) -> str:
        """By which equal ones are known."""

    @property
    def num_items(self) -> int:
        """That a device holds for it."""

    @property
    def num_bytes_on_device(self) -> int:
        """That it takes there."""


class CatalogStore:
    """Catalogs by digest, some of which have names. What nobody needs any more is forgotten.

    Args:
        named: Those that names stand for at first.
    """

    def __init__(self, named: Mapping[str, Catalog]) -> None:
        self.by_digest: dict[str, HeldTable] = {}
        self._named: dict[str, Catalog] = {}
        for name, catalog in named.items():
            self.name(name, catalog)

    @property
    def names(self) -> Collection[str]:
        return self._named.keys()

    def __getitem__(self, name: str) -> Catalog:
        """What a name stands for now."""
        return self._named[name]

    def name(self, name: str, catalog: Catalog) -> None:
        """Let a name stand for this one from now on."""
        old = self._named.get(name)
        self.add(catalog)
        self._named[name] = catalog
        if old is not None:
            self.drop_unused(old.digest)

    def add(self, catalog: Catalog) -> None:
        """Know a catalog."""
        self.by_digest[catalog.digest] = catalog

    def drop_unused(self, digest: str) -> bool:
        """Forget a catalog that nobody needs. Returns whether it is gone."""
        return not self.is_needed(digest) and self.by_digest.pop(digest, None) is not None

    def is_needed(self, digest: str) -> bool:
        return any(catalog.digest == digest for catalog in self._named.values())
