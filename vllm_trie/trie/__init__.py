"""The host's truth about a search, as two tries: tokens of hypotheses, and blocks of KV cache."""

import numpy as np


def num_equal_trie_columns(columns: np.ndarray) -> int:
    """How many columns, the first ones, have the same in every row: each row goes through these nodes, or blocks.

    Args:
        columns: [rows, n], one row at least.
    """
    differ = (columns != columns[0]).any(axis=0)
    return int(differ.argmax()) if differ.any() else len(differ)
