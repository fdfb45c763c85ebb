"""The host's state of a search, as two tries: tokens of hypotheses, and KV blocks. The scheduler keeps them."""

import numpy as np


def num_equal_trie_columns(columns: np.ndarray) -> int:
    """How many leading columns are equal in every row: the nodes, or blocks, that all rows share.

    Args:
        columns: [rows, n], at least one row.
    """
    differ = (columns != columns[0]).any(axis=0)
    return int(differ.argmax()) if differ.any() else len(differ)
