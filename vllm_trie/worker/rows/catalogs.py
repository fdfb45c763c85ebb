"""The catalogs of one worker, on its device. The scheduler decides which it has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from vllm_trie import catalog as catalog_files
from vllm_trie.messages import CatalogChanges
from vllm_trie.search.constraints.catalog import ConstraintTrie
from vllm_trie.search.constraints.closed_nodes import ClosedNodes
from vllm_trie.search.rules import SearchRules

if TYPE_CHECKING:
    from vllm_trie.catalog import Catalog


class RowCatalogs:
    """Item tries by the digest of their catalog.

    Args:
        device: The search's; None on the earlier stages of a pipeline, which do not search and have no tries.
        room: Bytes for what comes with requests: `request_tables_bytes`.
        files: The catalog files that the engine starts with.
    """

    def __init__(self, device: torch.device | None, room: int = 0, files: Collection[str] = ()) -> None:
        self._device, self._room = device, room
        self.files = files
        self.tries: dict[str, ConstraintTrie] = {}

    @cached_property
    def closed(self) -> ClosedNodes:
        """The catalog nodes that searches exclude."""
        return ClosedNodes(self._device or torch.device("meta"))

    def with_small_levels(self, rules_of_groups: Mapping[str, SearchRules], most: int) -> set[str]:
        """The groups whose catalogs have at most `most` tokens in every level."""
        return {id_ for id_, rules in rules_of_groups.items() if 0 < self.trie_of(rules).most_in_level <= most}

    def trie_of(self, rules: SearchRules) -> ConstraintTrie:
        """The trie that searches with these rules follow."""
        assert rules.items is not None
        return self.tries[rules.items.catalog]

    def room(self) -> torch.Tensor | None:
        """As much memory as what comes with requests may take; None without a device."""
        return None if self._device is None else torch.empty(self._room, dtype=torch.uint8, device=self._device)

    def load_first(self, path: str, vocab_size: int) -> None:
        """Loads a file at startup, which nobody may have checked before.

        Raises:
            ValueError: it is no catalog or no trie, which kernels would not notice, or has another vocabulary.
        """
        if self._device is not None:
            catalog = catalog_files.Catalog.open(path)
            catalog_files.check_structure(catalog)
            catalog.check_fits(vocab_size, None)
            self._add(catalog)

    def load(self, path: str, digest: str | None = None) -> str:
        """Loads a file that the front end has checked, if `digest` is None or its own. Returns its digest."""
        catalog = catalog_files.Catalog.open(path)
        if digest in (None, catalog.digest):
            self._add(catalog)
        return catalog.digest

    def apply(self, changes: CatalogChanges) -> None:
        """Makes the scheduler's changes, before a step."""
        if self._device is None:
            return
        for digest in changes.gone:
            self.tries.pop(digest, None)  # after a failed load not every worker has it
            self.closed.drop(digest)
        for content in changes.new.values():
            self._add(catalog_files.Catalog.from_bytes(content, checks=False))
        for digest, nodes in changes.closed.items():
            self.closed.add(digest, nodes)

    def _add(self, catalog: Catalog) -> None:
        if self._device is None or catalog.digest in self.tries:
            return
        arrays = catalog.first_child, catalog.tokens, catalog.is_item
        first_child, tokens, is_item = (torch.tensor(array, device=self._device) for array in arrays)
        sizes = catalog.most_children, catalog.tokens_by_depth()
        self.tries[catalog.digest] = ConstraintTrie(first_child, tokens, is_item, *sizes, self.closed)


class TakesRowCatalogs:
    """A worker that loads catalogs on request, see `vllm_trie.engine.catalogs`."""

    model_runner: Any

    def load_model(self, **kwargs: Any) -> None:
        """Loads the model, and then the engine's catalogs: outside of its weights, which `sleep` may discard.

        Profiling comes later, and counts their memory.
        """
        super().load_model(**kwargs)  # type: ignore[misc]
        vocab_size = self.model_runner.vllm_config.model_config.get_vocab_size()
        for path in self.model_runner.catalogs.files:
            self.model_runner.catalogs.load_first(path, vocab_size)

    def load_catalog(self, name: str, path: str, digest: str) -> str:
        """Loads a file, if its digest is this one. Returns its digest. Only the scheduler needs `name`."""
        return str(self.model_runner.catalogs.load(path, digest))
