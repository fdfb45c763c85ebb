"""Half characters of UTF-16, which a JSON text can hold and no tokenizer takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


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


def refuse_half_texts(params: SamplingParams) -> None:
    """Refuse texts of a beam request that cannot be sent to the engine, or tokenized.

    Raises:
        ValueError: naming the field, and what would work.
    """
    for name, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
        for text in texts or ():
            refuse_half_characters(name, text)
