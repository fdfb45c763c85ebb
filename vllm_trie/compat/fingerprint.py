"""Changing vLLM from outside, without surprises.

vLLM has official seams (`scheduler_cls`, `worker_cls`); whatever goes beyond them is a `Patch`. Every
piece of vLLM that a patch replaces or a subclass overrides is listed in `patches/touched.toml` and
recorded with the hash of its source under `patches/<version>/`. If the installed vLLM differs from
the record, the plugin refuses to start and names the piece.

    python -m vllm_trie.compat.fingerprint                 compare the installed vLLM with its record
    python -m vllm_trie.compat.fingerprint --against PATH  compare another one, a wheel or a folder, and list changes
    python -m vllm_trie.compat.fingerprint --record        write the record, of the installed vLLM or of --against
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import importlib
import importlib.util
import json
import re
import sys
import textwrap
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from difflib import unified_diff
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from vllm_trie.compat.patch import PatchError

SUPPORTED_VERSIONS = ("0.32", "0.33")
_PACKAGE = Path(__file__).resolve().parent.parent
RECORDS = next(p for p in (_PACKAGE / "patches", _PACKAGE.parent / "patches") if p.is_dir())
TOUCHED = RECORDS / "touched.toml"


class Sources:
    """One vLLM's package tree.

    Args:
        path: The folder that holds the package `vllm`, or a wheel.
        version: That of the vLLM; by default what its own `_version.py` says.

    Raises:
        PatchError: there is no vLLM at `path`.
    """

    def __init__(self, path: Path, version: str | None = None) -> None:
        self._read = _reader(path)
        self._parsed = cache(self._parse)
        self.version = version or self._own_version(path)

    def text(self, target: str) -> str:
        """The source of `target`, "module:qualified.name" of a class, function or method, without its indentation.

        Raises:
            PatchError: there is no such thing.
        """
        module, name = target.split(":")
        try:
            text, node = self._parsed(module)
        except (FileNotFoundError, KeyError):
            raise PatchError(f"this vLLM has no module {module}") from None
        for part in name.split("."):
            definitions = [n for n in node.body if getattr(n, "name", None) == part]
            if not definitions:
                raise PatchError(f"this vLLM has no {target}")
            node = definitions[-1]
        return textwrap.dedent("\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]))

    def fingerprint(self, target: str) -> str:
        """SHA-256 of the source of `target`."""
        return hashlib.sha256(self.text(target).encode()).hexdigest()

    def _parse(self, module: str) -> tuple[str, Any]:
        text = self._read(module.replace(".", "/") + ".py")
        return text, ast.parse(text)

    def _own_version(self, path: Path) -> str:
        try:
            found = re.search(r"^__version__ = (?:version = )?['\"](.+?)['\"]", self._read("vllm/_version.py"), re.M)
        except (FileNotFoundError, KeyError):
            found = None
        if found is None:
            raise PatchError(f"{path} has no vLLM with a version; name a wheel, or the folder that has vllm in it")
        return found[1]


def _reader(path: Path) -> Callable[[str], str]:
    """What reads a file, by its name within `path`."""
    if path.is_dir():
        return lambda name: (path / name).read_text(encoding="utf-8")
    if zipfile.is_zipfile(path):
        archive = zipfile.ZipFile(path)
        return lambda name: archive.read(name).decode("utf-8")
    raise PatchError(f"{path} is neither a folder nor a wheel")


def installed_vllm() -> Sources:
    """The installed vLLM.

    Raises:
        PatchError: vLLM is not installed.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise PatchError("vLLM is not installed; pip install 'vllm_trie[gpu]' or 'vllm_trie[cpu]'")
    version = importlib.import_module("vllm.version").__version__
    return Sources(Path(spec.origin).parent.parent, version)


@dataclass(frozen=True)
class Touched:
    """A piece of vLLM that this plugin replaces or relies on.

    Args:
        target: "module:qualified.name" of a class, function or method.
        how: "wrapped", "replaced", "overridden" or "relied upon", and by whom.
        why: What vLLM lacks.
        until: When it can go.
        only_in: The one supported version that has it, if others do not.
    """

    target: str
    how: str
    why: str
    until: str
    only_in: str = ""


def touched() -> list[Touched]:
    """Every piece of vLLM that this plugin wraps, replaces, overrides or relies upon."""
    pieces = []
    for entry in tomllib.loads(TOUCHED.read_text())["touched"]:
        for target, why in entry["why"].items():
            pieces.append(Touched(target, entry["how"], why, entry["until"], entry.get("only_in", "")))
    return pieces


def record_of(version: str) -> Path:
    """The record for this version of vLLM.

    Raises:
        PatchError: the version is not supported.
    """
    if minor(version) not in SUPPORTED_VERSIONS:
        raise PatchError(f"trie_beam does not support vLLM {version}; supported: {', '.join(SUPPORTED_VERSIONS)}")
    return _record_path(version)


def verify() -> None:
    """Compare the installed vLLM with its record.

    Raises:
        PatchError: vLLM is missing, unsupported, or differs; the message names every difference.
    """
    installed = installed_vllm()
    found = _compare(installed, json.loads(record_of(installed.version).read_text()))
    differences = [f"this vLLM has no {target}" for target in found.missing]
    differences += [f"{target} differs from the recorded source" for target in found.changed]
    if differences:
        raise PatchError(
            f"trie_beam does not fit this build of vLLM {installed.version}: {'; '.join(differences)}. "
            f"Use an unmodified vLLM {' or '.join(SUPPORTED_VERSIONS)}"
        )


@functools.cache
def verify_once() -> None:
    """`verify`, which takes the better part of a second, for the first engine of a process alone."""
    verify()


class Comparison(NamedTuple):
    """What has become of all that is touched."""

    missing: list[str]  # targets
    changed: list[str]
    same: list[str]


def compare(sources: Sources) -> tuple[Comparison, str]:
    """Compare a vLLM with the record of its version, or with the installed vLLM if there is no such record.

    Returns:
        The comparison, and what it was with, in words.

    Raises:
        PatchError: there is no record, and no vLLM is installed.
    """
    if (path := _record_path(sources.version)).exists():
        return _compare(sources, json.loads(path.read_text())), f"the record of {minor(sources.version)}"
    installed = installed_vllm()
    return _compare(sources, entries(installed)), f"the installed vLLM {installed.version}"


def _compare(sources: Sources, record: list[dict[str, str]]) -> Comparison:
    found = Comparison([], [], [])
    for entry in record:
        target = entry["target"]
        try:
            is_same = sources.fingerprint(target) == entry["sha256"]
        except PatchError:
            found.missing.append(target)
        else:
            (found.same if is_same else found.changed).append(target)
    return found


def entries(sources: Sources) -> list[dict[str, str]]:
    """What the record of a vLLM says: everything in `touched.toml` that its version has, and the hash of it.

    Raises:
        PatchError: a piece is missing.
    """
    present = [piece for piece in touched() if piece.only_in in ("", minor(sources.version))]
    return [
        {name: text for name, text in asdict(piece).items() if text} | {"sha256": sources.fingerprint(piece.target)}
        for piece in present
    ]


def write_record(sources: Sources) -> Path:
    """Record the sources of all that is touched, of a supported version or of one to come."""
    path = _record_path(sources.version)
    text = json.dumps(entries(sources), indent=2) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def minor(version: str) -> str:
    """What a record is for: "0.32" of "0.32.0"."""
    return ".".join(version.split(".")[:2])


def _record_path(version: str) -> Path:
    return RECORDS / minor(version) / "touched.json"


def _show(found: Comparison, sources: Sources, with_what: str) -> None:
    print(f"vLLM {sources.version} against {with_what}:")
    for state, targets in found._asdict().items():
        print("".join(f"  {state:8}{target}\n" for target in targets), end="")
    print(", ".join(f"{len(targets)} {state}" for state, targets in found._asdict().items()))


def _show_diffs(targets: list[str], sources: Sources) -> None:
    """How the sources of `targets` differ from the installed ones; of those that only one has, all is shown."""
    installed = installed_vllm()
    for target in targets:
        before, after = (_lines(one, target) for one in (installed, sources))
        names = f"{installed.version} {target}", f"{sources.version} {target}"
        print("\n" + "\n".join(unified_diff(before, after, *names, lineterm="", n=5)))


def _lines(sources: Sources, target: str) -> list[str]:
    try:
        return sources.text(target).splitlines()
    except PatchError:
        return []


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_trie.compat.fingerprint",
        description="Compare a vLLM with the record of what is touched. Exits with 1 if something differs.",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="PATH",
        help="another vLLM than the installed one: a wheel, or the folder that holds its package; nothing is imported",
    )
    parser.add_argument("--diff", action="store_true", help="with --against: show what differs from the installed vLLM")
    parser.add_argument("--record", action="store_true", help="write the record of that vLLM instead")
    arguments = parser.parse_args()
    if arguments.diff and (arguments.against is None or arguments.record):
        parser.error(
            "--diff shows what differs from the installed vLLM; name another one by --against, without --record"
        )
    try:
        other = None if arguments.against is None else Sources(arguments.against)
        if arguments.record:
            print(f"wrote {write_record(other or installed_vllm())}")
        elif other is None:
            verify()
            print(f"vLLM {installed_vllm().version} is as recorded")
        else:
            found, with_what = compare(other)
            _show(found, other, with_what)
            if arguments.diff:
                _show_diffs(found.missing + found.changed, other)
            sys.exit(1 if found.missing or found.changed else 0)
    except PatchError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
