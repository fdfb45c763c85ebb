"""Catalogs: sets of token sequences that beams may go along, as tries in files. Neither torch nor vLLM is needed."""

from vllm_trie.catalog.catalog import NO_ITEM, Catalog
from vllm_trie.catalog.store import CatalogStore
from vllm_trie.catalog.tokenizer import tokenizer_digest

__all__ = ["NO_ITEM", "Catalog", "CatalogStore", "tokenizer_digest"]
