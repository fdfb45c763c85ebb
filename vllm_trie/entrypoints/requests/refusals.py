"""Refusals of beam requests: one sentence, of a length that suits a log and a response."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm.exceptions import VLLMValidationError

from vllm_trie.options.shown import MOST_QUOTED, shortened_option_refusal

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


class BeamRequestError(VLLMValidationError, ValueError):
    """A request that beam search refuses: a ValueError offline, a 400 from the server.

    Args:
        refusal: Shortened here, whatever it quotes.
    """

    def __init__(self, refusal: str) -> None:
        super().__init__(shortened_option_refusal(refusal))


@contextmanager
def refusing_requests() -> Iterator[None]:
    """Make every ValueError of the block a refusal of the request."""
    try:
        yield
    except ValueError as error:
        raise BeamRequestError(str(error)) from None


@contextmanager
def shortening_request_refusals() -> Iterator[None]:
    """Shorten what vLLM refuses within the block, which may quote a value of any size."""
    try:
        yield
    except (VLLMValidationError, ValueError) as error:
        if len(str(error)) <= MOST_QUOTED:
            raise
        raise BeamRequestError(str(error)) from None


def lone_surrogate_in_request(text: str) -> str | None:
    """The first half character of UTF-16 in a text, as it is written; None if there is none.

    A JSON text can hold one, and no tokenizer takes it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return repr(text[error.start])
    return None


def refuse_request_half_characters(name: str, text: str) -> None:
    """Refuse a text that no tokenizer takes.

    Raises:
        ValueError: naming the option, and what would work.
    """
    if half := lone_surrogate_in_request(text):
        raise ValueError(f"{name} has half a character, {half}; mend or remove it")


def refuse_request_half_texts(params: SamplingParams) -> None:
    """Refuse texts of a beam request that cannot be sent to the engine, or tokenized.

    Raises:
        ValueError: naming the field, and what would work.
    """
    for name, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
        for text in texts or ():
            refuse_request_half_characters(name, text)
