"""What both tries ask of tables whose columns tell through what each row goes: nodes, or blocks."""

from __future__ import annotations

import numpy as np


def num_equal(columns: np.ndarray) -> int:
    """How many columns, the first ones, have the same in every row. `columns`: [rows, n], one row at least."""
    differ = (columns != columns[0]).any(axis=0)
    return int(differ.argmax()) if differ.any() else len(differ)
