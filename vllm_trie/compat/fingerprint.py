"""Compares a vLLM with the one that this plugin was written for, when an engine starts and in `python -m vllm_trie`.

`patches/touched.toml` lists every piece of vLLM that the plugin touches, with its grade. A *replaced* piece is one that
the plugin substitutes, or whose rules it repeats: its body must be the recorded one. A *called* piece is wrapped,
overridden with super(), or relied upon: calls must fit its signature, and a different body causes a warning.
`patches/<version>/touched.json` is the record. See docs/versions.md.
"""

from __future__ import annotations

import ast
import json
import os
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from vllm_trie.compat.patch import VLLMPatchError
from vllm_trie.compat.sources import VLLMSources, installed_vllm, minor_vllm_version
from vllm_trie.compat.syntax import vllm_body_digest, vllm_class_fields, vllm_signature, vllm_signature_misfit

RECORDED_VERSIONS = ("0.32.0", "0.33.0")
SUPPORTED_VERSIONS = tuple(map(minor_vllm_version, RECORDED_VERSIONS))
CHECK = "VLLM_TRIE_CHECK"
CHECKS = ("strict", "warn", "off")
CHECKED_STEPS = 100  # steps of groups with invariant checks, on a build that differs
_PACKAGE = Path(__file__).resolve().parent.parent
RECORDS = next(p for p in (_PACKAGE / "patches", _PACKAGE.parent / "patches") if p.is_dir())
TOUCHED = RECORDS / "touched.toml"


@dataclass(frozen=True)
class TouchedPart:
    """A piece of vLLM that this plugin replaces or relies on.

    Args:
        target: "module:qualified.name" of a class, function or method.
        grade: "replaced" or "called".
        how: "wrapped", "replaced", "overridden", "relied upon" or "constructed", and by whom.
        why: What vLLM lacks, or what the piece does for this plugin.
        until: When the plugin can stop touching it.
        fields: Further attributes that the class, or the method's class, must have.
        only_in: The only supported version that has it, if others do not.
    """

    target: str
    grade: str
    how: str
    why: str
    until: str
    fields: tuple[str, ...] = ()
    only_in: str = ""

    @property
    def is_for_cpu(self) -> bool:
        return " by vllm_trie.worker.cpu" in self.how and self.grade == "replaced"


def touched_parts() -> dict[str, TouchedPart]:
    """Every piece of vLLM that this plugin wraps, replaces, overrides or relies upon, by target."""
    pieces = {}
    for entry in tomllib.loads(TOUCHED.read_text())["touched"]:
        common = {name: entry.get(name, "") for name in ("grade", "how", "until", "only_in")}
        for target, why in entry["why"].items():
            pieces[target] = TouchedPart(
                target, why=why, fields=tuple(entry.get("fields", {}).get(target, ())), **common
            )
    return pieces


def vllm_record(version: str) -> Path:
    """The record for this version of vLLM, and for all its patch releases.

    Raises:
        VLLMPatchError: the version is not supported.
    """
    if minor_vllm_version(version) not in SUPPORTED_VERSIONS:
        raise VLLMPatchError(f"trie_beam does not support vLLM {version}; supported: {', '.join(SUPPORTED_VERSIONS)}")
    return vllm_record_path(version)


def vllm_record_path(version: str) -> Path:
    """The path of the record for a version, which may not exist."""
    return RECORDS / minor_vllm_version(version) / "touched.json"


def vllm_record_entries(sources: VLLMSources) -> dict[str, Any]:
    """The record of a vLLM: digests of its modules, and the fingerprint of each touched piece.

    Raises:
        VLLMPatchError: a piece is missing.
    """
    pieces = [piece for piece in touched_parts().values() if piece.only_in in ("", minor_vllm_version(sources.version))]
    modules = {_touched_module(piece.target): sources.digest(_touched_module(piece.target)) for piece in pieces}
    return {
        "vllm": sources.version,
        "modules": modules,
        "pieces": {p.target: _touched_fingerprint(p, sources) for p in pieces},
    }


def _touched_fingerprint(piece: TouchedPart, sources: VLLMSources) -> dict[str, str]:
    node = sources.node(piece.target)
    is_made = not isinstance(node, ast.ClassDef) or piece.how.startswith("constructed")
    calls = {"signature": vllm_signature(node)} if piece.grade == "called" and is_made else {}
    return {"body": vllm_body_digest(node), **calls}


def _touched_module(target: str) -> str:
    return target.split(":")[0]


class VLLMComparison(NamedTuple):
    """The touched pieces of a vLLM, compared with a record."""

    refused: dict[str, str]  # target -> why it does not fit
    changed: list[str]  # called targets whose body differs
    same: list[str]

    def problems(self, mode: str, needs_kernels: bool = True) -> dict[str, str]:
        """The targets that keep an engine from starting, and why.

        Args:
            mode: "strict" or "warn".
            needs_kernels: Whether the engine runs on a CPU without Triton; only then vllm_trie.worker.cpu is used.
        """
        if mode == "strict":
            return self.refused | dict.fromkeys(self.changed, "differs from the record")
        pieces = touched_parts()
        return {t: problem for t, problem in self.refused.items() if needs_kernels or not pieces[t].is_for_cpu}


def compare_vllm(sources: VLLMSources, record: dict[str, Any]) -> VLLMComparison:
    """Compare a vLLM with a record. Modules whose files are the recorded ones are not parsed."""
    found, pieces = VLLMComparison({}, [], []), touched_parts()
    unchanged = {module for module, digest in record["modules"].items() if sources.digest(module) == digest}
    for target, recorded in record["pieces"].items():
        if _touched_module(target) in unchanged:
            found.same.append(target)
            continue
        try:
            now = _touched_fingerprint(pieces[target], sources)
        except VLLMPatchError:
            found.refused[target] = "is gone"
            continue
        if problem := _touched_problem(pieces[target], recorded, now, sources):
            found.refused[target] = problem
        else:
            (found.same if now["body"] == recorded["body"] else found.changed).append(target)
    return found


def _touched_problem(piece: TouchedPart, recorded: dict[str, str], now: dict[str, str], sources: VLLMSources) -> str:
    if piece.grade == "replaced":
        return "" if now["body"] == recorded["body"] else "is not what trie_beam replaces"
    owner = piece.target if isinstance(sources.node(piece.target), ast.ClassDef) else piece.target.rpartition(".")[0]
    there = vllm_class_fields(sources.node(owner)) if piece.fields else ()
    if lost := [name for name in piece.fields if name not in there]:
        return f"has lost {', '.join(map(repr, lost))}"
    return vllm_signature_misfit(recorded["signature"], now["signature"]) if "signature" in recorded else ""


def vllm_check_mode(option: str | None) -> str:
    """The mode of the check: the engine's option, else the environment's `VLLM_TRIE_CHECK`, else "warn".

    Raises:
        ValueError: it is none of `CHECKS`.
    """
    name, value = ("trie_beam.vllm_check", option) if option is not None else (CHECK, os.environ.get(CHECK, "warn"))
    if value not in CHECKS:
        raise ValueError(f"{name}={value!r} is unknown; known: {', '.join(map(repr, CHECKS))}")
    return value


@cache
def compare_installed_vllm() -> VLLMComparison:
    """Compare the installed vLLM with its record, once in a process."""
    installed = installed_vllm()
    return compare_vllm(installed, json.loads(vllm_record(installed.version).read_text()))


def verify_vllm(option: str | None = None, needs_kernels: bool = True) -> list[str]:
    """Compare the installed vLLM with its record. Returns the pieces that differ and may still fit.

    Args:
        option: The engine's `vllm_check`.
        needs_kernels: See `VLLMComparison.problems`.

    Raises:
        VLLMPatchError: vLLM is missing, unsupported, or does not fit; the message names every piece.
        ValueError: an unknown `vllm_check`.
    """
    mode, version = vllm_check_mode(option), installed_vllm().version
    vllm_record(version)
    if mode == "off":
        return []
    found = compare_installed_vllm()
    if problems := found.problems(mode, needs_kernels):
        pieces = "; ".join(f"{target} {problem}" for target, problem in problems.items())
        enough = "off" if found.problems("warn", needs_kernels) else "warn"
        raise VLLMPatchError(
            f"trie_beam does not fit this vLLM {version}: {pieces}. Install vLLM {' or '.join(RECORDED_VERSIONS)} or a "
            f'newer trie_beam; vllm_check="{enough}" starts it nevertheless'
        )
    return found.changed


def vllm_steps_to_check(option: str | None) -> int:
    """For how many steps of groups the scheduler checks its invariants: `CHECKED_STEPS` on a build that differs."""
    return CHECKED_STEPS if vllm_check_mode(option) != "off" and compare_installed_vllm().changed else 0
