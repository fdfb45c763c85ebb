"""Patches apply once, come off again, and refuse a vLLM that is not the recorded one."""

from __future__ import annotations

import inspect
import json
import sys
import types
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import vllm

from tests.conftest import ROOT
from vllm_trie.compat import fingerprint
from vllm_trie.compat.fingerprint import (
    SUPPORTED_VERSIONS,
    Sources,
    entries,
    installed_vllm,
    main,
    record_of,
    touched,
    verify,
)
from vllm_trie.compat.patch import Patch, PatchError
from vllm_trie.worker.cpu.replace import replacements


@pytest.fixture
def victim() -> Iterator[types.ModuleType]:
    module = types.ModuleType("patch_victim")
    module.answer = lambda: 1
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_patch_replaces_and_reverts(victim: types.ModuleType) -> None:
    patch = Patch("patch_victim", "answer")
    patch.apply(lambda: 2)
    assert victim.answer() == 2
    patch.revert()
    assert victim.answer() == 1
    assert not patch.is_applied


def test_patching_twice_raises(victim: types.ModuleType) -> None:
    patch = Patch("patch_victim", "answer")
    patch.apply(lambda: 2)
    with pytest.raises(PatchError, match="patched already"):
        patch.apply(lambda: 3)
    assert victim.answer() == 2


def test_patching_what_does_not_exist_raises(victim: types.ModuleType) -> None:
    with pytest.raises(PatchError, match=r"no patch_victim\.question"):
        Patch("patch_victim", "question").apply(None)


def test_scoped_patch_comes_off_after_an_error(victim: types.ModuleType) -> None:
    def fail() -> None:
        with Patch("patch_victim", "answer").applied(lambda: 2):
            raise KeyError(victim.answer())

    with pytest.raises(KeyError, match="2"):
        fail()
    assert victim.answer() == 1


def test_installed_vllm_is_as_recorded() -> None:
    verify()


def test_record_lists_exactly_what_is_touched() -> None:
    installed = installed_vllm()
    assert json.loads(record_of(installed.version).read_text()) == entries(installed)


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_every_supported_version_has_a_record_of_all_that_is_touched(version: str) -> None:
    record = json.loads(record_of(version).read_text())
    pieces = [asdict(piece) for piece in touched() if piece.only_in in ("", version)]
    assert [{**dict.fromkeys(pieces[0], ""), **entry, "sha256": ""} for entry in record] == [
        {**piece, "sha256": ""} for piece in pieces
    ]
    assert all(len(entry["sha256"]) == 64 for entry in record)


def test_no_record_is_left_of_a_version_that_is_not_supported() -> None:
    assert sorted(folder.name for folder in (ROOT / "patches").iterdir() if folder.is_dir()) == [*SUPPORTED_VERSIONS]


def test_every_replacement_on_a_cpu_is_listed() -> None:
    ours = {target: f"replaced by {function.__module__}" for target, function in replacements().items()}
    assert ours == {piece.target: piece.how for piece in touched() if ".worker.cpu." in piece.how}


def test_every_override_of_a_vllm_method_is_listed() -> None:
    from vllm_trie.engine.async_scheduler import AsyncBeamScheduler
    from vllm_trie.engine.kv_cache import BeamKVCacheManager
    from vllm_trie.worker.cpu_worker import BeamCPUModelRunner, BeamCPUWorker
    from vllm_trie.worker.gpu_worker import BeamGPUWorker

    listed = {piece.target for piece in touched()}
    ends = (AsyncBeamScheduler, BeamKVCacheManager, BeamCPUModelRunner, BeamCPUWorker, BeamGPUWorker)
    ours = {cls for end in ends for cls in end.__mro__}
    for cls in {cls for cls in ours if cls.__module__.startswith("vllm_trie.")}:
        for name, member in vars(cls).items():
            if not inspect.isfunction(inspect.unwrap(member)) or (name.startswith("__") and name != "__init__"):
                continue
            owner = next((base for base in cls.__mro__[1:] if name in vars(base)), None)
            if owner is not None and owner.__module__.startswith("vllm."):
                assert f"{owner.__module__}:{owner.__qualname__}.{name}" in listed


@pytest.fixture
def copied_vllm(tmp_path: Path) -> Path:
    """A copy of the touched sources."""
    root = Path(vllm.__file__).parent.parent
    modules = {one["target"].split(":")[0] for one in entries(installed_vllm())}
    for name in ("vllm._version", *modules):
        module = Path(*name.split(".")).with_suffix(".py")
        (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / module).write_text((root / module).read_text())
    return tmp_path


@pytest.fixture
def altered_vllm(copied_vllm: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the touched sources that `verify` takes for the installed vLLM."""
    monkeypatch.setattr(fingerprint, "installed_vllm", lambda: Sources(copied_vllm))
    verify()
    return copied_vllm


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


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0"])
def test_unsupported_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fingerprint, "installed_vllm", lambda: Sources(tmp_path, version))
    with pytest.raises(PatchError, match=rf"does not support vLLM {version}; supported: 0\.32, 0\.33"):
        verify()


def test_missing_vllm_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PatchError, match="vLLM is not installed; pip install"):
        installed_vllm()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int | str | None:
    """`python -m vllm_trie.compat.fingerprint`, and its exit status."""
    monkeypatch.setattr("sys.argv", ["fingerprint", *map(str, arguments)])
    try:
        main()
    except SystemExit as ended:
        return ended.code
    return 0


def wheel_of(folder: Path, path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for file in sorted(folder.rglob("*.py")):
            wheel.write(file, file.relative_to(folder))
    return path


@pytest.mark.parametrize("as_wheel", [False, True])
def test_another_vllm_is_compared_with_the_record_of_its_version(
    as_wheel: bool, copied_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def other() -> Path:
        return wheel_of(copied_vllm, tmp_path / "other.whl") if as_wheel else copied_vllm

    version, count = installed_vllm().version, len(entries(installed_vllm()))
    assert run(monkeypatch, "--against", other()) == 0
    assert f"vLLM {version} against the record of {version[:4]}:\n" in (told := capsys.readouterr().out)
    assert told.endswith(f"0 missing, 0 changed, {count} same\n")

    scheduler = copied_vllm / "vllm" / "v1" / "core" / "sched" / "scheduler.py"
    scheduler.write_text(scheduler.read_text().replace("request.num_preemptions += 1", "request.num_preemptions += 2"))
    manager = copied_vllm / "vllm" / "v1" / "core" / "kv_cache_manager.py"
    manager.write_text(manager.read_text().replace("def cache_blocks", "def store_blocks"))
    (copied_vllm / "vllm" / "logprobs.py").unlink()
    assert run(monkeypatch, "--against", other()) == 1
    told = capsys.readouterr().out
    assert told.endswith(f"2 missing, 1 changed, {count - 3} same\n")
    assert "  changed vllm.v1.core.sched.scheduler:Scheduler._preempt_request\n" in told
    assert "  missing vllm.v1.core.kv_cache_manager:KVCacheManager.cache_blocks\n" in told
    assert "  missing vllm.logprobs:FlatLogprobs.append_fast\n" in told

    assert run(monkeypatch, "--against", other(), "--diff") == 1
    shown = capsys.readouterr().out.splitlines()
    assert "-    request.num_preemptions += 1" in shown
    assert "+    request.num_preemptions += 2" in shown
    assert "-def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:" in shown


def test_a_version_without_a_record_is_compared_with_the_installed_one_and_can_be_recorded(
    copied_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(fingerprint, "RECORDS", tmp_path / "patches")
    (copied_vllm / "vllm" / "_version.py").write_text("__version__ = version = '0.99.1'\n")
    assert run(monkeypatch, "--against", copied_vllm) == 0
    assert f"vLLM 0.99.1 against the installed vLLM {installed_vllm().version}:" in capsys.readouterr().out
    assert run(monkeypatch, "--record", "--against", copied_vllm) == 0
    assert (tmp_path / "patches" / "0.99" / "touched.json").exists()
    assert run(monkeypatch, "--against", copied_vllm) == 0
    assert "against the record of 0.99:" in capsys.readouterr().out


def test_what_is_no_vllm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text("text")
    assert run(monkeypatch, "--against", tmp_path) == (
        f"{tmp_path} has no vLLM with a version; name a wheel, or the folder that has vllm in it"
    )
    for path in (tmp_path / "text", tmp_path / "nowhere"):
        assert run(monkeypatch, "--against", path) == f"{path} is neither a folder nor a wheel"
    assert run(monkeypatch, "--diff") == 2
