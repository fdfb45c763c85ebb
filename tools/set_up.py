"""Make the virtual environment that `make demo` and `make test` run in.

    python3 tools/set_up.py .venv

Installs this project with vLLM's CPU build, and mends that build: see `vllm_trie.mend`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
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
    run(python, "-m", "vllm_trie.mend", "--yes")
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
    """Compile what is installed, and this project, on all cores; pip uses one.

    Where Python writes no bytecode by itself, every process would do it anew. Templates that look like Python fail.
    """
    ours = (ROOT / name for name in ("vllm_trie", "benchmarks", "tests"))
    subprocess.run([python, "-m", "compileall", "-qq", "-j", "0", python.parent.parent / "lib", *ours])


def run(*command: object, capture: bool = False) -> str:
    words = [str(word) for word in command]
    result = subprocess.run(words, stdout=subprocess.PIPE if capture else None, text=True)
    if result.returncode:
        sys.exit(f"failed: {' '.join(words)}")
    return result.stdout or ""


if __name__ == "__main__":
    main()
