"""What other systems call their options."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

OTHER_NAMES: dict[str, str] = tomllib.loads(Path(__file__).with_name("other_names.toml").read_text())  # here: elsewhere
_MEANT = {name: meant for meant, names in OTHER_NAMES.items() for name in names.split()}


def meant_by(name: str, known: Iterable[str], cutoff: float = 0.85) -> str | None:
    """Which option someone means, or a sentence that says why there is none; None: no idea."""
    word = re.sub(r"(?<=[a-z])(?=[A-Z])|-", "_", name).lower()
    return word if word in known else _MEANT.get(word) or next(iter(get_close_matches(word, known, 1, cutoff)), None)


def did_you_mean(meant: str) -> str:
    return meant if " " in meant else f"did you mean {meant}?"
