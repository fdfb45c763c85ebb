"""Compares a vLLM with the record of what this plugin touches, and writes that record.

python -m vllm_trie.compat                          compare the installed vLLM with its record
python -m vllm_trie.compat --against PATH           compare another one, a wheel or a folder; nothing of it is imported
python -m vllm_trie.compat --against PATH --diff    show how it differs from the installed one
python -m vllm_trie.compat --record                 write the record, of the installed vLLM or of --against
"""

from __future__ import annotations

import argparse
import json
import sys
from difflib import unified_diff
from pathlib import Path

from vllm_trie.compat.fingerprint import CHECK, SUPPORTED_VERSIONS, check_mode, compare, entries, record_path
from vllm_trie.compat.patch import PatchError
from vllm_trie.compat.sources import Sources, installed_vllm, minor


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_trie.compat",
        description="Compare a vLLM with the record of what is touched. "
        f"Exits with 1 if an engine would refuse it; {CHECK}=strict lets it refuse any difference.",
    )
    parser.add_argument("--against", type=Path, metavar="PATH", help="a wheel, or the folder that holds the package")
    parser.add_argument("--diff", action="store_true", help="with --against: show what differs from the installed vLLM")
    parser.add_argument("--record", action="store_true", help="write the record of that vLLM instead")
    arguments = parser.parse_args()
    try:
        sources = installed_vllm() if arguments.against is None else Sources(arguments.against)
        if arguments.record:
            print(f"wrote {write_record(sources)}")
        else:
            sys.exit(show(sources, arguments.diff))
    except (PatchError, ValueError) as error:
        sys.exit(str(error))


def write_record(sources: Sources) -> Path:
    """Write the record of a version that is supported, or of one to come."""
    path = record_path(sources.version)
    text = json.dumps(entries(sources), indent=2) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def show(sources: Sources, with_diff: bool) -> bool:
    """Print how a vLLM differs from the record of its version; if there is none, from the installed vLLM.

    Returns:
        Whether an engine would refuse these differences.
    """
    path = record_path(sources.version)
    record = json.loads(path.read_text()) if path.exists() else entries(installed_vllm())
    found = compare(sources, record)
    print(f"vLLM {sources.version} against {'the record of' if path.exists() else 'the installed'} {record['vllm']}:")
    if minor(sources.version) not in SUPPORTED_VERSIONS:
        print(f"  engines refuse every {minor(sources.version)}, which is not supported")
    for target, problem in found.refused.items():
        print(f"  refused {target} {problem}")
    for target in found.changed:
        print(f"  changed {target}")
    print(", ".join(f"{len(targets)} {state}" for state, targets in found._asdict().items()))
    for target in [*found.refused, *found.changed] if with_diff else ():
        _show_diff(target, installed_vllm(), sources)
    return check_mode(None) != "off" and bool(found.problems(check_mode(None)))


def _show_diff(target: str, installed: Sources, other: Sources) -> None:
    """How a piece differs from the installed one; if only one vLLM has it, all of it is shown."""
    before, after = (_lines(one, target) for one in (installed, other))
    names = f"{installed.version} {target}", f"{other.version} {target}"
    print("\n" + "\n".join(unified_diff(before, after, *names, lineterm="", n=5)))


def _lines(sources: Sources, target: str) -> list[str]:
    try:
        return sources.text(target).splitlines()
    except PatchError:
        return []


if __name__ == "__main__":
    main()
