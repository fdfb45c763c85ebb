"""Checks that the arrays of a catalog form a trie; a checksum shows only that they are as they were written."""

from __future__ import annotations

import numpy as np

from vllm_trie.catalog.arrays import CatalogArrays
from vllm_trie.catalog.catalog import Catalog
from vllm_trie.catalog.file_format import AGAIN, CatalogHeader


def check_structure(catalog: Catalog) -> None:
    """Raise ValueError if a node is unreachable, its children are not ascending, or no item follows it.

    Kernels look up nodes without bounds checks. This reads each array five times at most, takes about as long as the
    checksum, and temporarily needs memory of two thirds of the file's size.
    """
    if wrong := _catalog_structure_fault(catalog):
        raise ValueError(f"catalog {catalog.name} is not a trie: {wrong}; {AGAIN}")


def _catalog_structure_fault(catalog: Catalog) -> str:
    first, tokens, is_item = catalog.first_child, catalog.tokens, catalog.is_item
    if not len(tokens) or first[0] != 1 or first[-1] != len(tokens):
        return "not every node is a child"
    if (first[1:] < first[:-1]).any():
        return "first_child is not ascending"
    if (first[:-1] <= np.arange(len(tokens), dtype=np.int32)).any():
        return "a node comes before its parent"
    is_first = np.zeros(len(tokens) + 1, bool)
    is_first[first] = True
    if tokens[0] != -1 or (tokens[1:] < 0).any() or (~is_first[2:-1] & (tokens[2:] <= tokens[1:-1])).any():
        return "tokens are not ascending"
    if (is_item.view(np.uint8) > 1).any() or is_item[0] or is_item.sum() != catalog.num_items:
        return "is_item does not fit the items"
    if (~is_item & (first[1:] == first[:-1])).any():
        return "a node leads to no item"
    if (catalog.item_ids < 0).any():
        return "an id is negative"
    header = CatalogHeader.of(
        CatalogArrays(catalog.item_ids, first, tokens, is_item), catalog.vocab_size, catalog.tokenizer
    )
    named = vars(catalog)
    differing = [name for name, value in vars(header).items() if named[name] != value]
    return f"its header is wrong about {', '.join(differing)}" if differing else ""
