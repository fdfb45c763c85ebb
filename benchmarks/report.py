"""Measured tables as Markdown; `python -m benchmarks.report RESULTS.md` puts them where that file names them.

A place is a line `<!-- table: NAME -->`, or `<!-- table: NAME, VALUE by COLUMN -->` for that value alone, in one column
for each of what COLUMN holds. All up to the next `<!-- end -->` is replaced. Plots that the file shows are copied to
where it looks for them.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from shutil import copy
from typing import Any

PICTURES = "docs"
PLACE = re.compile(r"(<!-- table: (\w+)(?:, (.+?) by (.+?))? -->\n).*?(<!-- end -->)", re.DOTALL)


def as_markdown(folder: Path) -> Path:
    """Write all tables of a folder of results to its `tables.md`."""
    contents = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    target = folder / "tables.md"
    target.write_text("\n".join(f"## {one['title']}\n\n{_markdown(one)}" for one in contents if "cells" in one))
    return target


def fill_in(text: str, folder: Path) -> str:
    """Replace every named table of a text by the one measured.

    Raises:
        FileNotFoundError: a table is named that the folder lacks.
        ValueError: a column is named that the table lacks.
    """

    def measured(place: re.Match) -> str:
        start, name, value, by, end = place.groups()
        content = json.loads((folder / f"{name}.json").read_text())
        if value is not None:
            content |= _spread(content, value, by)
        return f"{start}{_markdown(content)}{end}"

    return PLACE.sub(measured, text)


def _spread(content: dict[str, Any], value: str, by: str) -> dict[str, Any]:
    """One row for all rows alike in the columns before `by`: `value`, in a column for each of what `by` holds."""
    at, at_value = content["columns"].index(by), content["columns"].index(value)
    spread: dict[tuple[Any, ...], dict[Any, Any]] = {}
    for row in (row for cell in content["cells"] for row in cell["rows"] if row[at_value] != ""):
        spread.setdefault(tuple(row[:at]), {})[row[at]] = row[at_value]
    held = list(dict.fromkeys(key for values in spread.values() for key in values))
    rows = [[*common, *(values.get(key, "") for key in held)] for common, values in spread.items()]
    named = [key if isinstance(key, str) else f"{key} {by}" for key in held]
    note = f"{value} of each; {content['note']}"
    return {"columns": [*content["columns"][:at], *named], "cells": [{"rows": rows}], "note": note}


def _markdown(content: dict[str, Any]) -> str:
    machine = content["machine"]
    lines = ["| " + " | ".join(map(_shown, content["columns"])) + " |", "|" + "---|" * len(content["columns"])]
    lines += ["| " + " | ".join(map(_shown, row)) + " |" for cell in content["cells"] for row in cell["rows"]]
    where = f"{machine['cores']} cores of {machine['processor']}; vLLM {machine['vllm']}, {machine['engine']}"
    about = f"{content['note']}. `{content['command']}`, {where}."
    return "\n".join(lines) + f"\n\n{about[0].upper()}{about[1:]}\n"


def _shown(cell: Any) -> str:
    return (f"{cell:.3g}" if isinstance(cell, float) else str(cell)).replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="Markdown with places for tables")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of measured tables")
    args = parser.parse_args()
    text = fill_in(args.file.read_text(), args.results)
    args.file.write_text(text)
    for picture in args.results.glob("*.png"):
        if f"({PICTURES}/{picture.name})" in text:
            copy(picture, args.file.parent / PICTURES / picture.name)


if __name__ == "__main__":
    main()
