"""Refusals of beam requests: one sentence, of a length that suits a log and a response."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.exceptions import VLLMValidationError

from vllm_trie.options.shown import MOST_QUOTED, shortened


class BeamRequestError(VLLMValidationError, ValueError):
    """A request that beam search refuses: a ValueError offline, a 400 from the server.

    Args:
        refusal: Shortened here, whatever it quotes.
    """

    def __init__(self, refusal: str) -> None:
        super().__init__(shortened(refusal))


@contextmanager
def refusing() -> Iterator[None]:
    """Make every ValueError of the block a refusal of the request."""
    try:
        yield
    except ValueError as error:
        raise BeamRequestError(str(error)) from None


@contextmanager
def shortening() -> Iterator[None]:
    """Shorten what vLLM refuses within the block, which may quote a value of any size."""
    try:
        yield
    except (VLLMValidationError, ValueError) as error:
        if len(str(error)) <= MOST_QUOTED:
            raise
        raise BeamRequestError(str(error)) from None
