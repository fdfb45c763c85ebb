"""Half characters of UTF-16, which a JSON text can hold and no tokenizer takes."""

from __future__ import annotations


def lone_surrogate(text: str) -> str | None:
    """The first one of a text, as it is written; None if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return repr(text[error.start])
    return None


def refuse_half_characters(name: str, text: str) -> None:
    """Refuse a text that no tokenizer takes.

    Raises:
        ValueError: naming the option, and what would work.
    """
    if half := lone_surrogate(text):
        raise ValueError(f"{name} has half a character, {half}; mend or remove it")
