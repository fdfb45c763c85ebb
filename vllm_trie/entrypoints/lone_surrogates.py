"""Half characters of UTF-16, which a JSON text can hold and no tokenizer takes."""

from __future__ import annotations


def lone_surrogate(text: str) -> str | None:
    """The first one of a text, as it is written; None if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return repr(text[error.start])
    return None
