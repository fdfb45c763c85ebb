"""The tables of docs/options.md, from the options of the package; `python -m tools.options_tables` renews them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic.fields import FieldInfo

from vllm_trie.options import EngineOptions
from vllm_trie.options.matrix import CLASHES, NEEDS, parsed_option_key
from vllm_trie.options.parts import Sampling, Speculating
from vllm_trie.options.request import PARTS
from vllm_trie.options.table import OTHER_NAMES, option_choices, option_fault

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"


def markdown_table(options: Mapping[str, FieldInfo]) -> str:
    """One row per option."""
    rows = ["| option | default | values | needs | meaning |", "|---|---|---|---|---|"]
    needs = {parsed_option_key(key)[0]: _words(need.needs, " or ") for need in NEEDS for key in need.these}
    for name, field in options.items():
        cells = f"`{name}`", _default(field), _values(field), needs.get(name, ""), str(field.description)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def markdown_clashes() -> str:
    """What does not go together: each of the one with each of the other."""
    rows = ["| option | excludes | because |", "|---|---|---|"]
    rows += [f"| {_words(row.these)} | {_words(row.others)} | {row.because} |" for row in CLASHES]
    return "\n".join(rows)


def _words(keys: Sequence[str], joined_by: str = ", ") -> str:
    """Options as users write them; of a part that is there as a whole, its name."""
    whole = {name: part.model_fields.keys() for name, part in PARTS.items() if part.model_fields.keys() <= {*keys}}
    of_whole = {key for name, fields in whole.items() if len(fields) > 1 for key in fields}
    named = [f"all of {name}" for name, fields in whole.items() if len(fields) > 1]
    return joined_by.join([*named, *(f"`{key}`" for key in keys if key not in of_whole)])


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
    of_requests = {*Sampling.model_fields, *Speculating.model_fields}
    own = {name: field for name, field in EngineOptions.model_fields.items() if name not in of_requests}
    tables = {name: markdown_table(part.model_fields) for name, part in PARTS.items()}
    tables |= {"engines": markdown_table(own), "pairs": markdown_clashes(), "names": markdown_names()}
    for name, table in tables.items():
        place = rf"(?<=<!-- {name} -->\n\n).*?(?=\n\n|\n\Z)"
        page, found = re.subn(place, lambda _, table=table: table, page, flags=re.DOTALL)
        assert found == 1, f"the page has no place for the table of {name}"
    return page


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "none" if field.default is None else f"`{json.dumps(field.default)}`"


def _values(field: FieldInfo) -> str:
    known = option_choices(field)
    if known:
        return ", ".join(f"`{json.dumps(value)}`" for value in known)
    return option_fault(field).removeprefix("is not ").replace("; pass", ":")


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
