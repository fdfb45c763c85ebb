"""Python code as a corpus: the standard library of the running interpreter, cut into definitions.

One *unit* is what a model should complete before it says EOS: a function, a method, a short class,
or the rest of a module. Units of held-out files are never trained on.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

STDLIB = Path(sysconfig.get_paths()["stdlib"])
LEFT_OUT = {"site-packages", "test", "tests", "encodings", "pydoc_data", "idle_test", "__pycache__"}
MAX_CLASS_LINES = 40
HELD_OUT_SHARE = 20  # one file in twenty
HELD_OUT_LIST = Path(__file__).with_name("held_out.txt")


def source_files() -> list[Path]:
    """Every source file of the standard library worth learning from, in a fixed order."""
    files = (path.relative_to(STDLIB) for path in STDLIB.rglob("*.py"))
    return sorted(path for path in files if not LEFT_OUT.intersection(path.parts))


def is_held_out(path: Path) -> bool:
    """Decided by the file's name alone, so that every rebuild holds out the same files."""
    digest = hashlib.sha256(path.as_posix().encode()).digest()
    return digest[0] % HELD_OUT_SHARE == 0


def held_out_files() -> list[Path]:
    """The held-out files the committed models were evaluated on, as far as this Python has them."""
    names = HELD_OUT_LIST.read_text().split()
    return [path for path in map(Path, names) if (STDLIB / path).exists()]


def units(path: Path) -> Iterator[str]:
    """Cut one file into units. A file that does not decode or parse yields nothing."""
    try:
        text = (STDLIB / path).read_text(encoding="utf-8")
        module = ast.parse(text)
    except (UnicodeDecodeError, SyntaxError):
        return
    lines = text.splitlines()
    rest_from = 0

    def cut(node: ast.stmt) -> str:
        return textwrap.dedent("\n".join(lines[_first_line(node) : node.end_lineno])) + "\n"

    for node in module.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if rest := "\n".join(lines[rest_from : _first_line(node)]).strip():
            yield rest + "\n"
        rest_from = node.end_lineno or rest_from
        if isinstance(node, ast.ClassDef) and rest_from - _first_line(node) > MAX_CLASS_LINES:
            members = [m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)]
            yield from map(cut, members)
        else:
            yield cut(node)
    if rest := "\n".join(lines[rest_from:]).strip():
        yield rest + "\n"


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)]) - 1


class Beginning(NamedTuple):
    """Of a function."""

    prompt: str  # up to a colon, without the newline: it and the indentation after it are one token
    next_line: str  # without its indentation


def held_out_prompts(count: int, min_lines: int = 8, max_lines: int = 60) -> list[str]:
    """`count` code prompts: what `held_out_beginnings` begin with."""
    return [beginning.prompt for beginning in held_out_beginnings(count, min_lines, max_lines)]


def held_out_beginnings(count: int, min_lines: int = 8, max_lines: int = 60) -> list[Beginning]:
    """`count` beginnings of held-out functions, spread over the held-out files.

    Raises:
        ValueError: fewer than `count` functions qualify.
    """
    per_file: list[list[Beginning]] = []
    for path in held_out_files():
        beginnings = []
        for unit in units(path):
            lines = unit.splitlines(keepends=True)
            if unit.startswith("def ") and min_lines <= len(lines) <= max_lines:
                half = lines[: len(lines) // 2]
                openings = [index for index, line in enumerate(half) if line.rstrip().endswith(":")]
                if openings:
                    body = openings[-1] + 1
                    beginnings.append(Beginning("".join(half[:body]).rstrip(), lines[body].strip()))
        if beginnings:
            per_file.append(beginnings)
    prompts: list[Beginning] = []
    depth = 0
    while len(prompts) < count and any(depth < len(beginnings) for beginnings in per_file):
        prompts += [beginnings[depth] for beginnings in per_file if depth < len(beginnings)]
        depth += 1
    if len(prompts) < count:
        raise ValueError(f"count={count} prompts asked for, {len(prompts)} held-out functions found")
    return prompts[:count]


def held_out_text() -> str:
    """All held-out units in one string, for prompts of any length."""
    return "\n".join(unit for path in held_out_files() for unit in units(path))
