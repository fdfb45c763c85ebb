"""Pairs of models that speculate."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests import models


@pytest.fixture(scope="session")
def random_pair(
    random_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, float], tuple[Path, Path]]:
    """A random model of a kind that `tests.models` knows, and a draft of it with so much noise."""

    def make(kind: str, noise: float) -> tuple[Path, Path]:
        target = random_model(kind)
        return target, models.make_draft(target, tmp_path_factory.mktemp(f"{kind}-draft"), noise, seed=3)

    return cache(make)
