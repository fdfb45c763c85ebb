"""Measured tables as Markdown: `python -m benchmarks.report` makes docs/results/ and fills in RESULTS.md.

Both come from the JSON that is kept in benchmarks/measured/. `--results FOLDER` first takes over what a run of
`python -m benchmarks` left there. Pages have all rows of a table. RESULTS.md names what it shows of one:

    <!-- table: NAME; COLUMN = VALUE or VALUE; show COLUMN + COLUMN -->
    <!-- table: NAME, COLUMN by KEY; COLUMN = VALUE -->

NAME is that of a table on the toy, or as in "smollm2/memory" or "whisper_base/speech" of one on a real model.

The first form keeps rows and columns. The second has a row for all rows alike in the columns before KEY, and a column
for each of what KEY holds. All up to the next `<!-- end -->` is replaced.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from shutil import copy
from typing import Any

from benchmarks.smollm2 import get
from benchmarks.whisper_base import get as whisper

ROOT = Path(__file__).resolve().parent.parent
OF_REAL_MODEL = "smollm2"  # the folder next to the toy's tables
OF_SPEECH = "whisper_base"  # the same of a model that hears
OF_GPUS = "gpu"  # another one, whose tables have one page together
ABOUT_GPUS = (
    "`python -m benchmarks.gpu_engines --minutes 8` measures engines in order of worth, and lists what did not fit. "
    "Cases alone: `--only` with beginnings of the names that `--help` has: `--only 1.7B:256x8 http:50 pair:exact`. "
    "`python -m benchmarks.gpu_check` makes the other tables, `--only` one of them. Commands with `--model` are of an "
    "earlier version."
)
BEFORE_GRAPHS = (
    "measured before steps of searches replayed full CUDA graphs, and one graph held a selection with its fork"
)
MEASURED = ROOT / "benchmarks" / "measured"
PAGES = ROOT / "docs" / "results"
RESULTS = ROOT / "RESULTS.md"
PLACE = re.compile(r"(<!-- table: ([\w/]+)(?:, (.+?) by (.+?))?((?:; .+?)*) -->\n).*?(<!-- end -->)", re.DOTALL)
SPREAD = dict.fromkeys(("throughput", "concurrency"), ("times our time (95 %)", "tokens/s (95 %)"))  # by search
PICTURES = {
    "memory": ("memory_by_step", "overlap_by_width"),
    "throughput": ("throughput_by_width",),
    "reclamation": ("reclamation_by_step",),
    "quality": ("quality_by_speed",),
    "dsbd_grid": ("front_of_widths",),
}
PARTS = {
    "memory": ("overlap", "beams", "Table 4 of the trie paper, measured: overlap")
}  # that have a page of their own
PLACES = (("On SmolLM2-135M-Instruct", OF_REAL_MODEL), ("On Whisper base", OF_SPEECH), ("On the toy", "."))
CONSTANT = 1  # values of a column that a filter leaves out

Content = dict[str, Any]


def as_markdown(folder: Path) -> Path:
    """Write all tables of a folder of results to its `tables.md`."""
    contents = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    target = folder / "tables.md"
    target.write_text("\n".join(f"## {one['title']}\n\n{_whole(one)}" for one in contents if "cells" in one))
    return target


def fill_in(text: str, folder: Path) -> str:
    """Replace every named table of a text by the one measured.

    Raises:
        FileNotFoundError: a table is named that the folder lacks.
        ValueError: a column is named that the table lacks, or a value that no row has.
    """

    def measured(place: re.Match) -> str:
        start, name, value, by, conditions, end = place.groups()
        content = json.loads((folder / f"{name}.json").read_text())
        kept = []
        for condition in conditions.split("; ")[1:]:
            if condition.startswith("show "):
                content = _shown_columns(content, condition.removeprefix("show ").split(" + "))
            else:
                column, _, values = condition.partition(" = ")
                content = _filtered(content, column, values.split(" or "))
                if column not in content["columns"]:
                    kept.append(f"{column}: {values}")
        if value is not None:
            content = _spread(content, value, by)
            kept.insert(0, value)
        about = "; ".join(kept)
        about = f"{about[0].upper()}{about[1:]}. " if about else ""
        return f"{start}{_table(content)}\n\n{about}`{content['command']}` ([all rows](docs/results/{name}.md))\n{end}"

    return PLACE.sub(measured, text)


def write_pages(folder: Path, pages: Path) -> None:
    """Write a page of all rows for each table of a folder, and a list of pages."""
    intro = (
        "All rows of the tables of [RESULTS.md](../../RESULTS.md). `python -m benchmarks.report` makes these pages "
        "from the JSON in benchmarks/measured/. Plots are of the same runs."
    )
    parts = [f"# Measured tables\n\n{intro}\n"]
    for heading, place in PLACES:
        pictures = _pictures(PAGES / place)
        measured = sorted((folder / place).glob("*.json"))
        titles = {}
        for path in measured:
            titles[path.stem] = _write_page(path, pages / place, pictures)
            if path.stem in PARTS:
                value, by, titles[value] = PARTS[path.stem]
                part = _spread(json.loads(path.read_text()), value, by)
                (pages / place / f"{value}.md").write_text(f"# {titles[value]}\n\n{_whole(part)}")
        links = "\n".join(f"- [{title}]({Path(place) / name}.md)" for name, title in titles.items())
        parts += [f"## {heading}\n\n{links}\n"] if titles else []
    if of_gpus := [json.loads(path.read_text()) for path in sorted((folder / OF_GPUS).glob("*.json"))]:
        tables = "\n".join(f"## {content['title']}\n\n{_whole(content)}" for content in of_gpus)
        (pages / f"{OF_GPUS}.md").write_text(f"# On a GPU\n\n{ABOUT_GPUS}{_age(of_gpus)}\n\n{tables}")
        links = "\n".join(f"- [{content['title']}]({OF_GPUS}.md)" for content in of_gpus)
        parts.append(f"## On a GPU\n\n{links}\n")
    (pages / "README.md").write_text("\n".join(parts))


def _age(of_gpus: list[Content]) -> str:
    """A sentence on tables that an earlier version measured, which did not write its own number."""
    num_old = sum("vllm_trie" not in content["machine"] for content in of_gpus)
    if num_old == len(of_gpus):
        return f" All of this was {BEFORE_GRAPHS}; nothing has run on a GPU since."
    return f" Tables that name no version of vllm_trie were {BEFORE_GRAPHS}." if num_old else ""


def _write_page(path: Path, folder: Path, pictures: Path) -> str:
    """Write the page of one table, with those pictures that there are, and return its title."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.loads(path.read_text())
    views = [_spread(content, value, "search") for value in SPREAD.get(path.stem, ())] or [content]
    parts = [f"# {content['title']}", *map(_whole, views)]
    shown = (name for name in PICTURES.get(path.stem, ()) if (pictures / f"{name}.png").exists())
    parts += [f"![{name.replace('_', ' ')}](../{name}.png)\n" for name in shown]
    (folder / f"{path.stem}.md").write_text("\n\n".join(part.rstrip("\n") for part in parts) + "\n")
    return content["title"]


def _pictures(pages: Path) -> Path:
    """Where the plots that a folder of pages shows are kept."""
    return pages.parent


def take_over(results: Path, folder: Path) -> None:
    """Keep the rows of what a run of the benchmarks measured, and the plots that pages show."""
    place = "."
    for path in sorted(results.glob("*.json")):
        content = json.loads(path.read_text())
        if "cells" in content:
            rows = [row for cell in content["cells"] for row in cell["rows"]]
            is_of_gpu = "torch" in content["machine"]
            places = {get.NAME: OF_REAL_MODEL, whisper.NAME: OF_SPEECH}
            place = OF_GPUS if is_of_gpu else places.get(content["setting"]["model"], ".")
            (folder / place).mkdir(parents=True, exist_ok=True)
            _keep(folder / place / path.name, content | {"cells": [{"rows": rows}]})
    for name in (name for names in PICTURES.values() for name in names):
        if (results / f"{name}.png").exists():
            copy(results / f"{name}.png", _pictures(PAGES / place))


def _keep(path: Path, content: Content) -> None:
    """Write a table as JSON, a row to a line."""
    kept = {key: content[key] for key in ("title", "note", "columns", "command", "machine") if key in content}
    rows = [row for cell in content["cells"] for row in cell["rows"]]
    lines = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    head = json.dumps(kept, indent=1, ensure_ascii=False)[:-2]
    path.write_text(f'{head},\n "cells": [{{"rows": [\n  {lines}\n ]}}]\n}}\n')


def _filtered(content: Content, column: str, values: list[str]) -> Content:
    """The rows that hold one of these values in a column, which goes if it is one value."""
    at = content["columns"].index(column)
    rows = [row for cell in content["cells"] for row in cell["rows"] if _shown(row[at]) in values]
    if not rows:
        raise ValueError(f"no row has {column} = {' or '.join(values)}")
    columns = content["columns"]
    if len(values) == CONSTANT:
        rows, columns = [[*row[:at], *row[at + 1 :]] for row in rows], [*columns[:at], *columns[at + 1 :]]
    return content | {"columns": columns, "cells": [{"rows": rows}]}


def _shown_columns(content: Content, columns: list[str]) -> Content:
    at = [content["columns"].index(column) for column in columns]
    rows = [[row[place] for place in at] for cell in content["cells"] for row in cell["rows"]]
    return content | {"columns": columns, "cells": [{"rows": rows}]}


def _spread(content: Content, value: str, by: str) -> Content:
    """One row for all rows alike in the columns before `by`: `value`, in a column for each of what `by` holds."""
    at, at_value = content["columns"].index(by), content["columns"].index(value)
    spread: dict[tuple[Any, ...], dict[Any, Any]] = {}
    for row in (row for cell in content["cells"] for row in cell["rows"] if row[at_value] != ""):
        spread.setdefault(tuple(row[:at]), {})[row[at]] = row[at_value]
    held = list(dict.fromkeys(key for values in spread.values() for key in values))
    held = sorted(held) if all(isinstance(key, int) for key in held) else held
    rows = [[*common, *(values.get(key, "") for key in held)] for common, values in spread.items()]
    named = [key if isinstance(key, str) else f"{key} {by}" if by.endswith("s") else f"{by} {key}" for key in held]
    note = f"{value} of each; {content['note']}"
    return content | {"columns": [*content["columns"][:at], *named], "cells": [{"rows": rows}], "note": note}


def _whole(content: Content) -> str:
    """A table with all that its note says."""
    engine = content.get("machine", {}).get("engine", "")
    note, where = content["note"], _where(content)
    about = f"{note[0].upper()}{note[1:]}. {where}{f' Engine: {engine}.' if engine else ''}".rstrip()
    return f"{_table(content)}\n\n{about}\n"


def _table(content: Content) -> str:
    lines = ["| " + " | ".join(map(_shown, content["columns"])) + " |", "|" + "---|" * len(content["columns"])]
    lines += ["| " + " | ".join(map(_shown, row)) + " |" for cell in content["cells"] for row in cell["rows"]]
    return "\n".join(lines)


def _where(content: Content) -> str:
    """The command, and what it ran on; nothing of what others have published."""
    if "command" not in content:
        return ""
    machine = content["machine"]
    if "torch" in machine:
        vllm = f", vLLM {machine['vllm']}" if machine["vllm"] else ""
        own = f", vllm_trie {machine['vllm_trie']}" if "vllm_trie" in machine else ""
        return f"`{content['command']}`, {machine['processor']}, torch {machine['torch']}{vllm}{own}."
    return f"`{content['command']}`, {machine['cores']} cores of {machine['processor']}, vLLM {machine['vllm']}."


def _shown(cell: Any) -> str:
    return (f"{cell:.3g}" if isinstance(cell, float) else str(cell)).replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, help="first take over the tables and plots of this folder")
    args = parser.parse_args()
    if args.results is not None:
        take_over(args.results, MEASURED)
    write_pages(MEASURED, PAGES)
    RESULTS.write_text(fill_in(RESULTS.read_text(), MEASURED))


if __name__ == "__main__":
    main()
