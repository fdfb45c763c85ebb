"""Rows a part at a time, so that what is held of each of them on the way is held of few of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

CELLS = 10_000_000  # tokens of the rows of a part: about 64 rows of the larger vocabularies


def rows_at_a_time(num_tokens: int) -> int:
    """How many rows of so many tokens each are one part; in it, a row of several groups counts for each of them."""
    return max(CELLS // max(num_tokens, 1), 1)


def parts(shape: tuple[int, ...]) -> Iterator[slice]:
    """Of r rows of V tokens in each of G groups, (G, r, V), which ones to take at a time: of few all in one go."""
    num_groups, num_rows, vocab_size = shape
    at_a_time = rows_at_a_time(num_groups * vocab_size)
    if num_rows <= at_a_time:
        yield slice(None)
        return
    for first in range(0, num_rows, at_a_time):
        yield slice(first, first + at_a_time)


def in_parts(shape: tuple[int, ...], function: Callable[[slice], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """What a function makes of rows, which it is asked for part by part.

    Args:
        shape: As for `parts`.
        function: Makes new tensors [G, rows, ...] of those rows of each group.

    Returns:
        Tensors [G, r, ...].
    """
    joined: tuple[torch.Tensor, ...] = ()
    for rows in parts(shape):
        made = function(rows)
        if rows == slice(None):
            return made
        joined = joined or tuple(part.new_empty(*shape[:2], *part.shape[2:]) for part in made)
        for whole, part in zip(joined, made, strict=True):
            whole[:, rows] = part
    return joined


def split(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Parts [..., n] of [..., N], the tokens of all rows of a group one after the other; as a rule it is one part."""
    return torch.split(values, CELLS, dim=-1)
