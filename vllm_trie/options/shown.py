"""How refusals quote values of a request: short, however large the value is, yet enough to find it."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from itertools import islice
from typing import Any

MOST_QUOTED = 500  # characters of a refusal
MOST_SHOWN = 80  # characters of a quoted value or name
MOST_LISTED = 160  # characters of a list of names


class _ShortenedOption(reprlib.Repr):
    """`reprlib.Repr` that takes bounded time for values of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 60
        self.maxlevel = 3

    def repr_int(self, value: int, level: int) -> str:
        """As in `reprlib`, except integers that Python refuses to convert to text."""
        return super().repr_int(value, level) if value.bit_length() < 1_000 else f"<{value.bit_length()} bits>"

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        """The first few entries, without sorting all of them."""
        return super().repr_dict(dict(islice(value.items(), self.maxdict + 1)), level)

    def repr_instance(self, value: Any, level: int) -> str:
        """As in `reprlib`, but only the type of arrays and the like, whose `repr` might write all of them."""
        return super().repr_instance(value, level) if not hasattr(value, "__len__") else f"<{type(value).__name__}>"


_shortened = _ShortenedOption()


def shown_option(value: Any) -> str:
    """The `repr` of a value, shortened in the middle."""
    return _cut_option_text(_shortened.repr(value), MOST_SHOWN)


def shown_option_name(name: Any) -> str:
    """A name without quotes, shortened in the middle; what is not printable is escaped."""
    return _cut_option_text(repr(str(name))[1:-1], MOST_SHOWN)


def listed_option_names(names: Iterable[Any]) -> str:
    """The first names in `MOST_LISTED` characters, and how many more there are."""
    every, text = [shown_option_name(name) for name in names], ""
    for place, name in enumerate(every):
        longer = f"{text}, {name}" if text else name
        if len(longer) > MOST_LISTED:
            return f"{text} and {len(every) - place} more"
        text = longer
    return text


def shortened_option_refusal(refusal: str) -> str:
    """Shorten a refusal that quotes an error of a parser or file system, which may have any length."""
    return _cut_option_text(refusal, MOST_QUOTED)


def _cut_option_text(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    tail = (most - 3) // 3
    return f"{text[: most - 3 - tail]}...{text[-tail:]}"
