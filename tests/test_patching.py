"""Patches apply once, come off again, and refuse a vLLM that is not the recorded one."""

from __future__ import annotations

import inspect
import json
import sys
import types
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from vllm_trie import patching
from vllm_trie.patching import Patch, PatchError, fingerprint, installed_vllm, record_of, verify
from vllm_trie.touched import TOUCHED


@pytest.fixture
def victim() -> Iterator[types.ModuleType]:
    module = types.ModuleType("patching_victim")
    module.answer = lambda: 1
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_patch_replaces_and_reverts(victim: types.ModuleType) -> None:
    patch = Patch("patching_victim", "answer")
    patch.apply(lambda: 2)
    assert victim.answer() == 2
    patch.revert()
    assert victim.answer() == 1
    assert not patch.is_applied


def test_patching_twice_raises(victim: types.ModuleType) -> None:
    patch = Patch("patching_victim", "answer")
    patch.apply(lambda: 2)
    with pytest.raises(PatchError, match="patched already"):
        patch.apply(lambda: 3)
    assert victim.answer() == 2


def test_patching_what_does_not_exist_raises(victim: types.ModuleType) -> None:
    with pytest.raises(PatchError, match=r"no patching_victim\.question"):
        Patch("patching_victim", "question").apply(None)


def test_scoped_patch_comes_off_after_an_error(victim: types.ModuleType) -> None:
    def fail() -> None:
        with Patch("patching_victim", "answer").applied(lambda: 2):
            raise KeyError(victim.answer())

    with pytest.raises(KeyError, match="2"):
        fail()
    assert victim.answer() == 1


def test_installed_vllm_is_as_recorded() -> None:
    verify()


def test_record_lists_exactly_what_is_touched() -> None:
    version, root = installed_vllm()
    expected = [{**asdict(touched), "sha256": fingerprint(touched.target, root)} for touched in TOUCHED]
    assert json.loads(record_of(version).read_text()) == expected


def test_every_override_of_a_vllm_method_is_listed() -> None:
    from vllm_trie.engine.async_scheduler import AsyncBeamScheduler
    from vllm_trie.engine.kv_cache import BeamKVCacheManager
    from vllm_trie.worker.cpu_worker import BeamCPUWorker
    from vllm_trie.worker.gpu_worker import BeamGPUWorker
    from vllm_trie.worker.v1_cpu import BeamCPUModelRunner
    from vllm_trie.worker.v2_cpu import BeamCPUModelRunnerV2

    listed = {touched.target for touched in TOUCHED}
    ends = (AsyncBeamScheduler, BeamKVCacheManager, BeamCPUModelRunner, BeamCPUModelRunnerV2)
    ours = {cls for end in (*ends, BeamCPUWorker, BeamGPUWorker) for cls in end.__mro__}
    for cls in {cls for cls in ours if cls.__module__.startswith("vllm_trie.")}:
        for name, member in vars(cls).items():
            if not inspect.isfunction(inspect.unwrap(member)) or (name.startswith("__") and name != "__init__"):
                continue
            owner = next((base for base in cls.__mro__[1:] if name in vars(base)), None)
            if owner is not None and owner.__module__.startswith("vllm."):
                assert f"{owner.__module__}:{owner.__qualname__}.{name}" in listed


@pytest.fixture
def altered_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the touched sources that `verify` takes for the installed vLLM."""
    version, root = installed_vllm()
    for touched in TOUCHED:
        module = Path(*touched.target.split(":")[0].split(".")).with_suffix(".py")
        (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / module).write_text((root / module).read_text())
    monkeypatch.setattr(patching, "installed_vllm", lambda: (version, tmp_path))
    verify()
    return tmp_path


def test_changed_source_is_refused_by_name(altered_vllm: Path) -> None:
    scheduler = altered_vllm / "vllm" / "v1" / "core" / "sched" / "scheduler.py"
    source = scheduler.read_text()
    scheduler.write_text(source.replace("request.num_preemptions += 1", "request.num_preemptions += 2"))
    with pytest.raises(PatchError, match=r"Scheduler\._preempt_request differs from the recorded source"):
        verify()


def test_change_elsewhere_in_a_touched_file_is_fine(altered_vllm: Path) -> None:
    scheduler = altered_vllm / "vllm" / "v1" / "core" / "sched" / "scheduler.py"
    scheduler.write_text(scheduler.read_text() + "\n\ndef somebody_elses() -> None:\n    pass\n")
    verify()


def test_missing_method_is_refused_by_name(altered_vllm: Path) -> None:
    manager = altered_vllm / "vllm" / "v1" / "core" / "kv_cache_manager.py"
    manager.write_text(manager.read_text().replace("def cache_blocks", "def store_blocks"))
    with pytest.raises(PatchError, match=r"no vllm\.v1\.core\.kv_cache_manager:KVCacheManager\.cache_blocks"):
        verify()


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0"])
def test_unsupported_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(patching, "installed_vllm", lambda: (version, tmp_path))
    with pytest.raises(PatchError, match=rf"does not support vLLM {version}; supported: 0\.32"):
        verify()


def test_missing_vllm_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PatchError, match="vLLM is not installed; pip install"):
        installed_vllm()
