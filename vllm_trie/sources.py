"""The Python sources of one vLLM, installed or not, read without importing any of them."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import textwrap
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


class PatchError(RuntimeError):
    """The vLLM at hand is not the one this plugin was written for."""


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
