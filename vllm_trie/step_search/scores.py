"""What scorers return, checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_trie.finite_numbers import finite_numbers


class ScorerError(ValueError):
    """A scorer failed, or returned what are no scores."""


def checked_step_scores(scores: Iterable[Any], count: int) -> list[float]:
    """What a scorer returned, as `count` numbers.

    Raises:
        ScorerError: it is something else.
    """
    return finite_numbers(scores, count, "scorer", "candidate", ScorerError)
