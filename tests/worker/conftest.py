from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """vLLM's own kernels elsewhere, and ours in this process."""
    import vllm.v1.worker.cpu_worker  # noqa: F401  patches torch for a CPU

    from vllm_trie.worker.cpu.replace import install_replacements_on_cpu

    interpreter = Interpreter()
    install_replacements_on_cpu("drafts", "states")
    yield interpreter
    interpreter.close()
