"""Reads the sources of a vLLM, in a folder or a wheel, without importing it."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import zipfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from vllm_trie.compat.patch import VLLMPatchError


class VLLMSources:
    """The source tree of one vLLM.

    Args:
        path: The folder that holds the package `vllm`, or a wheel.

    Raises:
        VLLMPatchError: there is no vLLM at `path`.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir() and not zipfile.is_zipfile(path):
            raise VLLMPatchError(f"{path} is neither a folder nor a wheel")
        root = path if path.is_dir() else zipfile.Path(path)
        self._read = cache(lambda name: (root / name).read_text(encoding="utf-8"))
        self._parsed = cache(lambda module: ast.parse(self._text(module)))
        found = None
        with suppress(VLLMPatchError):
            found = re.search(r"^__version__ = (?:version = )?['\"](.+?)['\"]", self._text("vllm._version"), re.M)
        if found is None:
            raise VLLMPatchError(f"{path} has no vLLM with a version; name a wheel, or the folder that has vllm in it")
        self.version = found[1]

    def digest(self, module: str) -> str | None:
        """SHA-256 of the file of `module`; None if there is none."""
        with suppress(VLLMPatchError):
            return hashlib.sha256(self._text(module).encode()).hexdigest()
        return None

    def node(self, target: str) -> Any:
        """The syntax tree of `target`, "module:qualified.name" of a class, function or method.

        Raises:
            VLLMPatchError: there is no such class, function or method.
        """
        module, name = target.split(":")
        node: Any = self._parsed(module)
        for part in name.split("."):
            definitions = [n for n in node.body if getattr(n, "name", None) == part]
            if not definitions:
                raise VLLMPatchError(f"this vLLM has no {target}")
            node = definitions[-1]
        return node

    def _text(self, module: str) -> str:
        path = module.replace(".", "/")
        for name in (f"{path}.py", f"{path}/__init__.py"):
            with suppress(FileNotFoundError):
                return self._read(name)
        raise VLLMPatchError(f"this vLLM has no module {module}")


def installed_vllm() -> VLLMSources:
    """The installed vLLM.

    Raises:
        VLLMPatchError: vLLM is not installed.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise VLLMPatchError("vLLM is not installed; pip install 'vllm_trie[gpu]' or 'vllm_trie[cpu]'")
    return VLLMSources(Path(spec.origin).parent.parent)


def minor_vllm_version(version: str) -> str:
    """The minor version, by which records are kept: "0.32" of "0.32.0"."""
    return ".".join(version.split(".")[:2])
