"""The option `contrast`, whose weights have names and defaults of O'Brien and Lewis 2023 (arXiv 2309.09117)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from vllm_trie.options.shown import shown_option
from vllm_trie.options.table import Number

MOST_BETA = 1_000  # with more, sums in float32 would no longer tell hypotheses apart
DEFAULTS = {"model": "draft", "alpha": 0.1, "beta": 0.5}


class ContrastOption(TypedDict, total=False):
    """Which model is contrasted, and how; `DEFAULTS` stand for what is left out."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[misc]
    model: Literal["draft"]
    alpha: Annotated[Number, Field(gt=0, le=1)]
    beta: Annotated[Number, Field(ge=0, le=MOST_BETA)]


def contrast_option_weights(contrast: Mapping[str, Any]) -> dict[str, float]:
    """Its alpha and beta."""
    given = {**DEFAULTS, **contrast}
    return {name: float(given[name]) for name in ("alpha", "beta")}


def check_contrast_option(contrast: Mapping[str, Any] | None, why_not: str | None) -> None:
    """Refuse to contrast without a draft model that says something of every token.

    Args:
        why_not: What an engine has instead; None if it has one.

    Raises:
        ValueError: naming the option, and what would work.
    """
    if contrast is not None and why_not is not None:
        raise ValueError(
            f"contrast={shown_option(dict(contrast))} needs a draft model, and this engine {why_not}; start it with "
            'speculative_config={"method": "draft_model", "model": ..., "num_speculative_tokens": ...}, or leave it out'
        )
