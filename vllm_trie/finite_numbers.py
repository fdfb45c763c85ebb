"""Checks that a user's callable, a scorer or a metric, returned one finite number for each of its inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def finite_numbers(values: Iterable[Any], count: int, who: str, each: str, error: type[ValueError]) -> list[float]:
    """Convert `values` to `count` finite numbers.

    Args:
        who: The callable's kind, for messages.
        each: The kind of its inputs, for messages.

    Raises:
        ValueError: they are not; of the type `error`.
    """
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError, OverflowError) as why:
        raise error(f"the {who} returned what is not a number: {why}; return a number per {each}") from None
    if len(numbers) != count:
        raise error(f"the {who} returned {len(numbers)} numbers for {count} {each}s; return one for each")
    for index, number in enumerate(numbers):
        if not math.isfinite(number):
            raise error(f"the {who} returned {number} for {each} {index} of {count}; return finite numbers")
    return numbers
