"""Checks what scorers return."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_trie.finite_numbers import finite_numbers


class ScorerError(ValueError):
    """A scorer failed, or did not return scores."""


class UnreachableScorerError(ScorerError):
    """A scorer's endpoint did not answer."""


def checked_step_scores(scores: Iterable[Any], count: int) -> list[float]:
    """The scores that a scorer returned, as `count` finite numbers.

    Raises:
        ScorerError: they are not.
    """
    return finite_numbers(scores, count, "scorer", "candidate", ScorerError)
