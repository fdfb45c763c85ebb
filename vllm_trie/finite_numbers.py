"""What a user's callable returned, checked: a finite number for each thing that it was asked about."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def finite_numbers(
    values: Iterable[Any], count: int, who: str, each: str, error: type[ValueError] = ValueError
) -> list[float]:
    """`values` as `count` numbers.

    Args:
        who: What returned them, in messages.
        each: What it was asked about.

    Raises:
        ValueError: they are something else; of the type `error`.
    """
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError, OverflowError) as why:
        raise error(f"the {who} returned what are no numbers: {why}; return a number per {each}") from None
    if len(numbers) != count:
        raise error(f"the {who} returned {len(numbers)} numbers for {count} {each}s; return one for each")
    for index, number in enumerate(numbers):
        if not math.isfinite(number):
            raise error(f"the {who} returned {number} for {each} {index} of {count}; return finite numbers")
    return numbers
