"""Arrays that are no trie are told from those that are, whatever their checksum says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vllm_trie.catalog import Catalog
from vllm_trie.catalog.arrays import CatalogArrays
from vllm_trie.catalog.file_format import CatalogHeader, pack_catalog
from vllm_trie.catalog.structure import check_structure

GOOD = CatalogArrays(  # [1, 2], [1, 3], [4]
    item_ids=np.array([2, 0, 1]),
    first_child=np.array([1, 3, 5, 5, 5, 5], np.int32),
    tokens=np.array([-1, 1, 4, 2, 3], np.int32),
    is_item=np.array([0, 0, 1, 1, 1], bool),
)
HEADER = CatalogHeader.of(GOOD, None, None)


def catalog(header: CatalogHeader = HEADER, **changed: Any) -> Catalog:
    arrays = {name: np.asarray(changed.get(name, array), array.dtype) for name, array in GOOD._asdict().items()}
    return Catalog.from_bytes(pack_catalog(header, CatalogArrays(**arrays)), "items")


def test_the_arrays_that_are_changed_below_are_a_trie() -> None:
    check_structure(catalog())
    assert catalog().to_bytes() == Catalog.from_sequences([[1, 2], [1, 3], [4]]).to_bytes()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"first_child": [0, 3, 5, 5, 5, 5]}, "not every node is a child"),
        ({"first_child": [1, 3, 5, 5, 5, 4]}, "not every node is a child"),
        ({"first_child": [1, 3, 2, 5, 5, 5]}, "first_child is not ascending"),
        ({"first_child": [1, 1, 5, 5, 5, 5]}, "a node comes before its parent"),
        ({"tokens": [-1, 4, 1, 2, 3]}, "tokens are not ascending"),
        ({"tokens": [-1, 1, 4, 3, 3]}, "tokens are not ascending"),
        ({"tokens": [0, 1, 4, 2, 3]}, "tokens are not ascending"),
        ({"tokens": [-1, -1, 4, 2, 3]}, "tokens are not ascending"),
        ({"is_item": np.array([0, 0, 1, 2, 1], np.uint8).view(bool)}, "is_item does not fit the items"),
        ({"is_item": [1, 0, 0, 1, 1]}, "is_item does not fit the items"),
        ({"is_item": [0, 1, 1, 1, 1]}, "is_item does not fit the items"),
        ({"is_item": [0, 1, 1, 1, 0]}, "a node leads to no item"),
        ({"item_ids": [2, 0, -5]}, "an id is negative"),
        ({"header": replace(HEADER, longest=3, max_token=9)}, "its header is wrong about longest, max_token"),
    ],
)
def test_what_is_no_trie_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^catalog items is not a trie: {message}; build it again with python -m"):
        check_structure(catalog(**changed))
