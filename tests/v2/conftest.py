"""These tests need the V2 runner in all of their process: `VLLM_USE_V2_MODEL_RUNNER=1 python -m pytest tests/v2`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests import RUNS_V2


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    needs_v2 = pytest.mark.skip(reason="needs VLLM_USE_V2_MODEL_RUNNER=1, as `make test` runs it")
    for item in items:
        if not RUNS_V2 and Path(__file__).parent in item.path.parents:
            item.add_marker(needs_v2)
