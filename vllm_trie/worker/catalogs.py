"""The catalogs of one worker, on its device. Called by `runner`; which there are, the scheduler decides."""

from __future__ import annotations

from typing import Any

import torch

from vllm_trie.catalog import Catalog
from vllm_trie.messages import CatalogChanges
from vllm_trie.search.constraints.catalog import ItemTrie
from vllm_trie.selection import config_of


class TakesCatalogs:
    """A worker that is told to load catalogs, see `vllm_trie.engine.catalogs`."""

    model_runner: Any

    def load_model(self, **kwargs: Any) -> None:
        """Load the model, and then the engine's catalogs: beside its weights, which `sleep` may discard.

        Profiling counts their memory, as it comes later.
        """
        super().load_model(**kwargs)  # type: ignore[misc]
        for path in config_of(self.model_runner.vllm_config).catalogs.values():
            self.model_runner.catalogs.load(path)

    def load_catalog(self, name: str, path: str, digest: str) -> str:
        """Load a file for a name, which the scheduler alone knows, if its digest is this one. Returns what it is."""
        return str(self.model_runner.catalogs.load(path, digest))


class DeviceCatalogs:
    """Item tries by the digest of their catalog.

    Args:
        device: Where the search is; None on the earlier stages of a pipeline, which have no part in it, and hold none.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self.tries: dict[str, ItemTrie] = {}

    def load(self, path: str, digest: str | None = None) -> str:
        """Take in a file, unless its digest is another one than this. Returns what it is."""
        catalog = Catalog.open(path)
        if digest in (None, catalog.digest):
            self._add(catalog)
        return catalog.digest

    def apply(self, changes: CatalogChanges) -> None:
        """Do what the scheduler says, before a step."""
        if self._device is None:
            return
        for digest in changes.gone:
            self.tries.pop(digest, None)  # which not every worker has after a load that failed
        for content in changes.new.values():
            self._add(Catalog.from_bytes(content))

    def _add(self, catalog: Catalog) -> None:
        if self._device is None or catalog.digest in self.tries:
            return
        arrays = catalog.first_child, catalog.tokens, catalog.is_item
        first_child, tokens, is_item = (torch.tensor(array, device=self._device) for array in arrays)
        self.tries[catalog.digest] = ItemTrie(first_child, tokens, is_item, catalog.most_children)
