"""What of a text no tokenizer takes."""

from __future__ import annotations


def half_character(text: str) -> str | None:
    """The first lone surrogate, as it is written, if there is one: JSON can hold it, and no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return repr(text[error.start])
    return None
