"""Measured tables as Markdown; `python -m benchmarks.report RESULTS.md` puts them where that file names them.

A place is a line `<!-- table: NAME -->`, with all up to the next `<!-- end -->` replaced. Plots that the file shows are
copied to where it looks for them.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from shutil import copy
from typing import Any

PICTURES = "docs"
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


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
    """

    def measured(place: re.Match) -> str:
        content = json.loads((folder / f"{place[2]}.json").read_text())
        return f"{place[1]}{_markdown(content)}{place[3]}"

    return PLACE.sub(measured, text)


def _markdown(content: dict[str, Any]) -> str:
    machine = content["machine"]
    lines = ["| " + " | ".join(map(_shown, content["columns"])) + " |", "|" + "---|" * len(content["columns"])]
    lines += ["| " + " | ".join(map(_shown, row)) + " |" for cell in content["cells"] for row in cell["rows"]]
    where = f"{machine['cores']} cores of {machine['processor']}; {machine['engine']}"
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
