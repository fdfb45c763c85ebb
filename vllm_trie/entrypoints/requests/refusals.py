"""Refusals of beam requests: one sentence, short enough for a log and a response."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm.exceptions import VLLMValidationError

from vllm_trie.options.shown import MOST_QUOTED, shortened_option_refusal
from vllm_trie.search.stop_strings import INCOMPLETE

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


class BeamRequestError(VLLMValidationError, ValueError):
    """The refusal of a request by beam search: a ValueError offline, a 400 from the server.

    Args:
        refusal: Shortened here, as it may quote a long value.
    """

    def __init__(self, refusal: str) -> None:
        super().__init__(shortened_option_refusal(refusal))


@contextmanager
def refusing_requests() -> Iterator[None]:
    """Turn every ValueError of the `with` block into a refusal of the request."""
    try:
        yield
    except ValueError as error:
        raise BeamRequestError(str(error)) from None


@contextmanager
def shortening_request_refusals() -> Iterator[None]:
    """Shorten vLLM's refusals within the `with` block, which may quote values of any size."""
    try:
        yield
    except (VLLMValidationError, ValueError) as error:
        if len(str(error)) <= MOST_QUOTED:
            raise
        raise BeamRequestError(str(error)) from None


def lone_surrogate_in_request(text: str) -> str | None:
    """The `repr` of the first lone surrogate of UTF-16 in a text; None if there is none.

    A JSON text can contain one, but tokenizers refuse it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return repr(text[error.start])
    return None


def refuse_request_half_characters(name: str, text: str) -> None:
    """Refuse a text with a lone surrogate, which tokenizers do not accept.

    Raises:
        ValueError: names the option and what would work.
    """
    if half := lone_surrogate_in_request(text):
        raise ValueError(f"{name} has half of a surrogate pair, {half}; fix or remove it")


def refuse_request_half_texts(params: SamplingParams) -> None:
    """Refuse stop strings and bad words that cannot be tokenized or sent to the engine, or found in text.

    Raises:
        ValueError: names the field and what would work.
    """
    for name, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
        for text in texts or ():
            refuse_request_half_characters(name, text)
    if any(INCOMPLETE in text for text in params.stop or ()):
        raise ValueError("stop has U+FFFD, which also stands for every unfinished character; remove it")
