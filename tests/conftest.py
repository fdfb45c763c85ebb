"""Models made on the spot, and engines that live as long as tests in a row want the same one."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models import COPIES, make
from benchmarks.smollm2 import get
from tests import models
from tests.rows import WatchedRows
from vllm_trie.selection import has_beams

os.environ.setdefault("VLLM_TRIE_CHECK", "strict")  # also in the processes that tests start
ROOT = Path(__file__).resolve().parent.parent
TRAINED_TARGET = ROOT / "benchmarks" / "stdlib_pair" / "target"
BLOCK_SIZE = 32  # the smallest that vLLM's CPU attention takes
KV_CACHE_BYTES = 256 << 20

STARTS_ENGINES = ("engines", "_engines")  # the fixtures
SLOW = (  # whatever else takes long: it starts processes, or servers
    "tests/benchmarks/",
    "tests/distributed/",
    "tests/entrypoints/test_catalog_api.py",
    "tests/entrypoints/test_async_llm.py",
    "tests/entrypoints/test_server.py",
    "tests/entrypoints/test_streams.py",
    "tests/entrypoints/test_transcriptions.py",
    "tests/entrypoints/test_step_search_served.py",
    "tests/entrypoints/test_beam_search.py",
    "tests/real_model/",
    "tests/entrypoints/test_cli.py::test_a_command_other_than_serve_knows_the_flag_too",
    "tests/worker/cpu/",
    "tests/worker/test_kernels_compile.py",
    "tests/test_plugin.py",
    "tests/test_readme.py",
)
SMOKE = "tests/test_smoke.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start engines are slow, except the smoke tests, which share one."""
    for item in items:
        starts_engines = any(name in item.fixturenames for name in STARTS_ENGINES)
        if not item.nodeid.startswith(SMOKE) and (starts_engines or item.nodeid.startswith(SLOW)):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny random model, of a kind that `tests.models` knows."""
    return cache(lambda kind: models.make(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="session")
def copying_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model that goes on as its newest tokens did before, with the trained model's tokens."""
    return make(COPIES, str(TRAINED_TARGET), tmp_path_factory.mktemp("copies"))


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Folder of SmolLM2-135M-Instruct. Skips where it cannot be had, but not in continuous integration."""
    return _had(get.target)


@pytest.fixture(scope="session")
def real_draft(real_model: Path) -> Path:
    """Folder of its draft model."""
    return _had(get.draft)


def _had(get_folder: Callable[[], Path]) -> Path:
    try:
        return get_folder()
    except get.UnavailableError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@cache
def _find_kernels_once() -> None:
    """vLLM's CPU workers look through all modules for kernels to replace, and wrap those again that have been."""
    from vllm.platforms.cpu import CpuPlatform

    find = cache(CpuPlatform.register_triton_kernel_overrides)
    CpuPlatform.register_triton_kernel_overrides = staticmethod(find)


class Engine:
    """One in-process vLLM engine, and what it must look like when nothing runs."""

    def __init__(self, model: Path, **options: Any) -> None:
        from vllm import LLM

        options.setdefault("additional_config", {"trie_beam": {"check_invariants": True}})
        options.setdefault("max_model_len", 512)
        options.setdefault("max_num_seqs", 64)
        options.setdefault("kv_cache_memory_bytes", KV_CACHE_BYTES)
        options.setdefault("dtype", "float32")
        has_tokenizer = (model / "tokenizer.json").exists()
        _find_kernels_once()
        gc.freeze()  # vLLM collects garbage five times at a start, half a second each if it looks at all it imported
        self.llm = LLM(
            str(model),
            enforce_eager=True,
            block_size=BLOCK_SIZE,
            skip_tokenizer_init=not has_tokenizer,
            **options,
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.watched = self.watch()

    def watch(self) -> WatchedRows | None:
        """Compare rows after every step."""
        return WatchedRows(self) if has_beams(self.core.vllm_config) else None

    @property
    def runner(self) -> Any:
        """The model runner of an engine that has one alone."""
        return self.core.model_executor.driver_worker.worker.model_runner

    def generate(self, prompts: list[list[int]], params: Any) -> list[Any]:
        return self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    def check_nothing_is_left(self) -> None:
        """Raise AssertionError if a block, a group, an address or a request outlived its search."""
        assert self.scheduler.kv_cache_manager.num_used_blocks == 0, "KV blocks leak"
        assert not self.scheduler.kv_cache_manager._groups
        assert not self.scheduler.groups
        assert not self.scheduler.requests
        assert not self.scheduler.mailbox
        assert not self.scheduler.mailbox._deliveries, "a delivery was never completed"
        assert not self.llm.llm_engine.has_unfinished_requests()

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.core, self.scheduler
        gc.collect()


class Engines:
    """Keeps the engine that was asked for last."""

    def __init__(self) -> None:
        self._key: object = None
        self._engine: Engine | None = None

    def __call__(self, model: Path, **options: Any) -> Engine:
        key = (model, repr(sorted(options.items())))
        if self._engine is None or key != self._key:
            self.close()
            self._engine, self._key = Engine(model, **options), key
        return self._engine

    @property
    def alive(self) -> Engine | None:
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


@pytest.fixture(scope="session")
def _engines() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    engines.close()


@pytest.fixture
def engines(_engines: Engines) -> Iterator[Engines]:
    """`engines(model, **options)` gives an engine; after the test nothing may be left in it."""
    yield _engines
    if _engines.alive is not None:
        _engines.alive.check_nothing_is_left()
