"""The catalogs of one engine, as each process that looks items up knows them: its front ends, and its scheduler."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_trie.catalog.catalog import Catalog


class CatalogStore:
    """Catalogs by digest, some of which have names. What nobody needs any more is forgotten.

    Args:
        named: Those that names stand for at first.
    """

    def __init__(self, named: Mapping[str, Catalog]) -> None:
        self.by_digest: dict[str, Catalog] = {}
        self._digests: dict[str, str] = {}  # by name
        for name, catalog in named.items():
            self.name(name, catalog)

    @property
    def names(self) -> Collection[str]:
        return self._digests.keys()

    def __getitem__(self, name: str) -> Catalog:
        """What a name stands for now."""
        return self.by_digest[self._digests[name]]

    def name(self, name: str, catalog: Catalog) -> None:
        """Let a name stand for this one from now on."""
        old = self._digests.get(name)
        self.add(catalog)
        self._digests[name] = catalog.digest
        if old is not None:
            self.drop_unused(old)

    def add(self, catalog: Catalog) -> None:
        """Know a catalog."""
        self.by_digest[catalog.digest] = catalog

    def drop_unused(self, digest: str) -> bool:
        """Forget a catalog that nobody needs. Returns whether it is gone."""
        return not self.is_needed(digest) and self.by_digest.pop(digest, None) is not None

    def is_needed(self, digest: str) -> bool:
        return digest in self._digests.values()
