"""What a worker takes onto its device: nothing that leads kernels out of their arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_trie.catalog import Catalog
from vllm_trie.catalog.arrays import CatalogArrays
from vllm_trie.catalog.file_format import CatalogHeader, pack_catalog
from vllm_trie.worker.rows.catalogs import RowCatalogs


def test_a_worker_looks_at_the_files_of_its_start_itself(tmp_path: Path) -> None:
    """They may have been replaced since the front end looked."""
    workers, path = RowCatalogs(torch.device("cpu")), tmp_path / "items.catalog"
    good = Catalog.from_sequences([[5, 6], [5, 7]])
    good.save(path)
    with pytest.raises(ValueError, match="it has token 7, and the model has 7 tokens"):
        workers.load_first(str(path), vocab_size=7)
    arrays = CatalogArrays(good.item_ids, good.first_child, good.tokens, good.is_item)
    astray = np.append(good.first_child[:-1], 1 << 30).astype(np.int32)
    path.write_bytes(pack_catalog(CatalogHeader.of(arrays, None, None), arrays._replace(first_child=astray)))
    with pytest.raises(ValueError, match="is not a trie: not every node is a child"):
        workers.load_first(str(path), vocab_size=8)
    assert not workers.tries
    good.save(path)
    workers.load_first(str(path), vocab_size=8)
    assert [*workers.tries] == [good.digest]
