"""Catalogs: sets of token sequences that beams must follow, as tries in files. Needs neither torch nor vLLM."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_trie.catalog.store import CatalogStore

if TYPE_CHECKING:
    from vllm_trie.catalog.catalog import NO_ITEM, Catalog
    from vllm_trie.catalog.structure import check_structure
    from vllm_trie.catalog.tokenizer import tokenizer_digest

__all__ = ["NO_ITEM", "Catalog", "CatalogStore", "check_structure", "tokenizer_digest"]

_HOMES = {
    "NO_ITEM": "vllm_trie.catalog.catalog",
    "Catalog": "vllm_trie.catalog.catalog",
    "check_structure": "vllm_trie.catalog.structure",
    "tokenizer_digest": "vllm_trie.catalog.tokenizer",
}


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` on first use, by engines and requests with catalogs."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
