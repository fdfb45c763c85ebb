"""Count what some work calls: a measure of work that does not depend on the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def num_calls(work: Callable[[], Any]) -> int:
    """Calls of functions, in Python and in C, that some work takes."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
