"""Cases of a sweep: those that `make test` runs, one for each path of the code, and those of the night."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest


def sweep(cases: Mapping[str, Any] | Collection[str], *each_time: str) -> list[Any]:
    """Parameters of all cases; all but those that are named here carry the mark `nightly`.

    Args:
        cases: By name, or the names alone.
        each_time: Names of what `make test` runs.

    Raises:
        ValueError: there is no case of that name.
    """
    if unknown := {*each_time} - {*cases}:
        raise ValueError(f"no cases of this sweep: {sorted(unknown)}; known: {', '.join(cases)}")
    by_name = cases if isinstance(cases, Mapping) else {name: name for name in cases}
    return [
        pytest.param(case, id=name, marks=() if name in each_time else pytest.mark.nightly)
        for name, case in by_name.items()
    ]
