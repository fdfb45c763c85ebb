"""What other systems call their options."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

OTHER_NAMES: dict[str, str] = tomllib.loads(Path(__file__).with_name("other_names.toml").read_text())  # here: elsewhere
_MEANT = {name: meant for meant, names in OTHER_NAMES.items() for name in names.split()}
MOST_LIKE = 64  # characters of what somebody may have meant: twice as many as any name has


def meant_by(name: str, known: Iterable[str], cutoff: float = 0.85) -> str | None:
    """Which option someone means, or a sentence that says why there is none; None: no idea."""
    return _meant_by(name, tuple(known), cutoff) if len(name) <= MOST_LIKE else None


@lru_cache(maxsize=1024)  # requests have the same keys again and again, and comparing one takes 0.1 ms
def _meant_by(name: str, known: tuple[str, ...], cutoff: float) -> str | None:
    word = re.sub(r"(?<=[a-z])(?=[A-Z])|-", "_", name).lower()
    return word if word in known else _MEANT.get(word) or next(iter(get_close_matches(word, known, 1, cutoff)), None)


def did_you_mean(meant: str) -> str:
    return meant if " " in meant else f"did you mean {meant}?"
