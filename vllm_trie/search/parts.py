"""Processes rows a part at a time, to bound the memory that intermediate results take.

Groups that need much memory share a step only if their rows are one part; only a single wide search takes several.
See `vllm_trie.worker.select.select`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

CELLS = 10_000_000  # tokens of the rows of a part: about 64 rows of the larger vocabularies
CELLS_NEAR = 1 << 17  # tokens of rows that fit the cache of one core of a host


def search_rows_at_a_time(vocab_size: int) -> int:
    """How many rows of `vocab_size` tokens each are one part."""
    return max(CELLS // vocab_size, 1)


def search_parts(shape: tuple[int, ...]) -> Iterator[slice]:
    """Slices of the r rows to process at a time, for shape (G, r, V)."""
    num_groups, num_rows, vocab_size = shape
    at_a_time = search_rows_at_a_time(num_groups * vocab_size)
    for first in range(0, num_rows, at_a_time):
        yield slice(first, first + at_a_time)


def in_search_parts(
    shape: tuple[int, ...], function: Callable[..., tuple[torch.Tensor, ...]], *of_rows: Any
) -> tuple[torch.Tensor, ...]:
    """Applies a function to rows, in one go if they are one part.

    Args:
        shape: As for `search_parts`.
        function: Makes tensors [G, rows, ...] from its arguments.
        of_rows: Its arguments for all rows: tensors [G, r, ...] and `SearchBeams`.

    Returns:
        Tensors [G, r, ...]; new ones if there are several parts.
    """
    num_groups, num_rows, vocab_size = shape
    if num_groups * num_rows * vocab_size <= CELLS:
        return function(*of_rows)
    joined: tuple[torch.Tensor, ...] = ()
    for rows in search_parts(shape):
        made = function(*(own[:, rows] if isinstance(own, torch.Tensor) else own.rows(rows) for own in of_rows))
        joined = joined or tuple(part.new_empty(num_groups, num_rows, *part.shape[2:]) for part in made)
        for whole, part in zip(joined, made, strict=True):
            whole[:, rows] = part
    return joined


def split_for_search(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Parts [..., n] of [..., N], the tokens of all rows of a group one after the other."""
    return (values,) if values.shape[-1] <= CELLS else torch.split(values, CELLS, dim=-1)


def search_rows_near_at_hand(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Splits rows [N, V] in a host's memory into as many at a time as fit the caches of its cores."""
    return torch.split(rows, max(CELLS_NEAR * torch.get_num_threads() // rows.shape[-1], 1))
