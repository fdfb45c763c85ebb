"""What a refusal quotes of a request: enough to find it there, however large it is."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from itertools import islice
from typing import Any

MOST_QUOTED = 500  # characters of a refusal
MOST_SHOWN = 80  # of one value in it, or of one name
MOST_LISTED = 160  # of the names that are known instead


class _ShortenedOption(reprlib.Repr):
    """`reprlib.Repr`, of values of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 60
        self.maxlevel = 3

    def repr_int(self, value: int, level: int) -> str:
        """As `reprlib` does it, but for numbers that Python refuses to write down."""
        return super().repr_int(value, level) if value.bit_length() < 1_000 else f"<{value.bit_length()} bits>"

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        """The first few, without sorting all of them."""
        return super().repr_dict(dict(islice(value.items(), self.maxdict + 1)), level)

    def repr_instance(self, value: Any, level: int) -> str:
        """As `reprlib` does it; of arrays and the like the type alone, as all of one might be written first."""
        return super().repr_instance(value, level) if not hasattr(value, "__len__") else f"<{type(value).__name__}>"


_shortened = _ShortenedOption()


def shown_option(value: Any) -> str:
    """A value as Python writes it, shortened in the middle."""
    return _cut_option_text(_shortened.repr(value), MOST_SHOWN)


def shown_option_name(name: Any) -> str:
    """A name, without quotes, shortened likewise."""
    return _cut_option_text(str(name), MOST_SHOWN)


def listed_option_names(names: Iterable[Any]) -> str:
    """Names, as many as there is room for, and how many more there are."""
    every, text = [shown_option_name(name) for name in names], ""
    for place, name in enumerate(every):
        longer = f"{text}, {name}" if text else name
        if len(longer) > MOST_LISTED:
            return f"{text} and {len(every) - place} more"
        text = longer
    return text


def shortened_option_refusal(refusal: str) -> str:
    """A refusal that quotes what others have said, a parser or a file system, of whatever length that is."""
    return _cut_option_text(refusal, MOST_QUOTED)


def _cut_option_text(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    tail = (most - 3) // 3
    return f"{text[: most - 3 - tail]}...{text[-tail:]}"
