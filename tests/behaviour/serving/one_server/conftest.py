"""The server that the tests of this folder share, and one without the plugin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.server import Server, serving


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server") / "log", "--plugin", "trie_beam") as server:
        yield server


@pytest.fixture(scope="package")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("stock") / "log") as server:
        yield server
