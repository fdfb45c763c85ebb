"""Models made on the spot, the real one, and engines that live as long as tests in a row want the same one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from benchmarks.model_wheels import UnavailableError
from benchmarks.models import COPIES, make
from benchmarks.smollm2 import get
from benchmarks.whisper_base import get as whisper
from tests.support import language_once  # noqa: F401
from tests.support.engine import ROOT, TRAINED_TARGET, Engines

AT_START = Path(__file__).parent / "support" / "at_start"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(AT_START), os.environ.get("PYTHONPATH")]))

# How long an example takes is no matter of tests: machines differ, and are busy.
settings.register_profile("untimed", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

SMOKE = "tests/behaviour/test_smoke.py"
FORK = (  # from a process that has imported vLLM; some share a server, too
    "tests/behaviour/serving/",
    "tests/behaviour/distributed/",
    "tests/behaviour/offline/test_beam_search.py",
    "tests/behaviour/real_model/test_served.py",
    "tests/entrypoints/test_cli.py",
    "tests/test_plugin.py",
)
INTERPRET = "tests/worker/cpu/", "tests/worker/test_interpreted_engine.py"  # vLLM's kernels, in a process apart
LONGEST_FIRST = (
    *FORK,
    "tests/golden/",
    "tests/worker/select/test_selection_graphs",
    "tests/worker/startup/test_widest_steps",
    "tests/behaviour/offline/",
    "tests/benchmarks/",
    "tests/behaviour/real_model/",
    "tests/test_examples",
    "tests/test_readme",
    "tests/behaviour/",
    "tests/test_",
)


class _Shares(LoadScopeScheduling):
    """Gives each process whole files, in their order, and one process all files that `FORK` names, or `INTERPRET`."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        together = (names for names in (FORK, INTERPRET) if nodeid.startswith(names))
        return next(together, (nodeid.partition("::")[0],))[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _Shares(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long comes first, so that no process is left with it when the others are done.

    Raises:
        UsageError: a test that starts an engine is not marked as slow, and is none of those of `make test-fast`.
    """
    fast = [item for item in items if not item.get_closest_marker("slow") and not item.nodeid.startswith(SMOKE)]
    for item in fast:
        if "_engines" in item.fixturenames:
            raise pytest.UsageError(f"{item.nodeid} starts an engine: mark it as slow")
    starts = [*LONGEST_FIRST, ""]
    items.sort(key=lambda item: next(rank for rank, start in enumerate(starts) if item.nodeid.startswith(start)))


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings that the plugin logs."""
    warned: list[str] = []
    logger = logging.getLogger("vllm.trie_beam")
    monkeypatch.setattr(logger, "warning", lambda text, *args: warned.append(text % args))
    return warned


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny random model, of a kind that `tests.support.models` knows."""
    from tests.support import models  # and transformers, which the process that shares out tests never needs

    return cache(lambda kind: models.make(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="session")
def random_pair(
    random_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, float], tuple[Path, Path]]:
    """A random model of a kind that `tests.support.models` knows, and a draft of it with so much noise."""
    from tests.support import models

    def make(kind: str, noise: float) -> tuple[Path, Path]:
        target = random_model(kind)
        return target, models.make_draft(target, tmp_path_factory.mktemp(f"{kind}-draft"), noise, seed=3)

    return cache(make)


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


@pytest.fixture(scope="session")
def speech_model() -> Path:
    """Folder of Whisper base. Skips likewise."""
    return _had(whisper.model)


def _had(get_folder: Callable[[], Path]) -> Path:
    try:
        return get_folder()
    except UnavailableError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


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


@pytest.fixture
def with_shared_engines(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`LLM` gives an engine in this process that lives on; no example minds that it counts. Pooling models end soon."""
    import vllm

    from vllm_trie.step_search import scorers  # noqa: F401  (it must know vLLM's own class)

    stock, pooling = vllm.LLM, list[Any]()

    def make(model: str, **options: Any) -> Any:
        with monkeypatch.context() as for_engines:
            for_engines.setattr(vllm, "LLM", stock)
            if options.get("runner") == "pooling":
                pooling.append(stock(model, enforce_eager=True, max_model_len=512, dtype="float32", **options))
                return pooling[-1]
            return engines(ROOT / model, **{"disable_log_stats": False, **options}).llm

    monkeypatch.setattr(vllm, "LLM", make)
    yield
    if pooling:  # which takes with it what all engines of this process need
        if engines.alive is not None:
            engines.alive.check_nothing_is_left()
        engines.close()
        for llm in pooling:
            llm.llm_engine.engine_core.shutdown()
