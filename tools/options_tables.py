"""The tables of docs/options.md, from the options of the package; `python -m tools.options_tables` renews them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pydantic.fields import FieldInfo

from vllm_trie.options import OTHER_NAMES, BeamParams, SpeculationOptions, TrieBeamConfig, about, choices

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"


def markdown_table(options: type[SpeculationOptions]) -> str:
    """One row per option of requests (`BeamParams`) or engines (`TrieBeamConfig`), those that both have at the end."""
    rows = ["| option | default | values | goes with | meaning |", "|---|---|---|---|---|"]
    for name, field in sorted(options.model_fields.items(), key=lambda row: row[0] in SpeculationOptions.model_fields):
        cells = f"`{name}`", _default(field), _values(field), about(field, "goes_with"), str(field.description)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def markdown_names() -> str:
    """What other systems call their options, and what to use here."""
    rows = ["| elsewhere | here |", "|---|---|"]
    for meant, names in OTHER_NAMES.items():
        rows.append(
            f"| {', '.join(f'`{name}`' for name in names.split())} | {meant if ' ' in meant else f'`{meant}`'} |"
        )
    return "\n".join(rows)


def with_tables(page: str) -> str:
    """The page, with each table in its place: between `<!-- name -->` and the next empty line."""
    tables = {
        "requests": markdown_table(BeamParams),
        "engines": markdown_table(TrieBeamConfig),
        "names": markdown_names(),
    }
    for name, table in tables.items():
        page = re.sub(rf"(?<=<!-- {name} -->\n\n).*?(?=\n\n|\n\Z)", lambda _, table=table: table, page, flags=re.DOTALL)
    return page


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "none" if field.default is None else f"`{json.dumps(field.default)}`"


def _values(field: FieldInfo) -> str:
    known = choices(field)
    if known:
        return ", ".join(f"`{json.dumps(value)}`" for value in known)
    return about(field, "wrong").removeprefix("is not ").replace("; pass", ":")


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
