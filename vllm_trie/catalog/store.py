"""The catalogs of one engine in each process that looks up items: its front ends and its scheduler."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vllm_trie.catalog.catalog import Catalog


class HeldTable(Protocol):
    """A table that devices look up for searches: a catalog, or the nodes closed to a search."""

    @property
    def digest(self) -> str:
        """Equal for equal tables."""

    @property
    def num_items(self) -> int:
        """Items that a device holds for it."""

    @property
    def num_bytes_on_device(self) -> int:
        """Bytes that it takes on a device."""


class CatalogStore:
    """Catalogs by digest, some of which have names. Catalogs that are no longer needed are dropped.

    Args:
        named: The catalogs that have names at first.
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
        """The catalog that a name stands for now."""
        return self._named[name]

    def name(self, name: str, catalog: Catalog) -> None:
        """Let a name stand for this catalog from now on."""
        old = self._named.get(name)
        self.add(catalog)
        self._named[name] = catalog
        if old is not None:
            self.drop_unused(old.digest)

    def add(self, catalog: Catalog) -> None:
        """Add a catalog."""
        self.by_digest[catalog.digest] = catalog

    def drop_unused(self, digest: str) -> bool:
        """Drop a catalog if it is not needed. Returns whether it was dropped."""
        return not self.is_needed(digest) and self.by_digest.pop(digest, None) is not None

    def is_needed(self, digest: str) -> bool:
        return any(catalog.digest == digest for catalog in self._named.values())
