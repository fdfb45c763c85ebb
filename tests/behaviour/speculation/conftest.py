"""The trained pair, unless a file has an engine of its own."""

from __future__ import annotations

import pytest

from tests.support.engine import Engine, Engines
from tests.support.trained_pair import held_out, trained_pair


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return trained_pair(engines)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return held_out()
