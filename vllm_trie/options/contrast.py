"""The option `contrast`, whose weights are named as in O'Brien and Lewis 2023 (arXiv 2309.09117)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from vllm_trie.options.shown import shown_option
from vllm_trie.options.table import Number

MOST_BETA = 1_000  # above this, float32 sums can no longer separate hypotheses
DEFAULTS = {"model": "draft", "alpha": 0.1, "beta": 0.5}


class ContrastOption(TypedDict, total=False):
    """The value of `contrast`; `DEFAULTS` fill in missing keys."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[misc]
    model: Literal["draft"]
    alpha: Annotated[Number, Field(gt=0, le=1)]
    beta: Annotated[Number, Field(ge=0, le=MOST_BETA)]


def contrast_option_weights(contrast: Mapping[str, Any]) -> dict[str, float]:
    """The `alpha` and `beta` of a value of `contrast`, with defaults."""
    given = {**DEFAULTS, **contrast}
    return {name: float(given[name]) for name in ("alpha", "beta")}


def check_contrast_option(contrast: Mapping[str, Any] | None, why_not: str | None) -> None:
    """Refuse `contrast` without a draft model that gives every token a probability.

    Args:
        why_not: What the engine has instead, as a clause; None if it has such a model.

    Raises:
        ValueError: names the option, its value and what would work.
    """
    if contrast is not None and why_not is not None:
        raise ValueError(
            f"contrast={shown_option(dict(contrast))} needs a draft model, and this engine {why_not}; start it with "
            'speculative_config={"method": "draft_model", "model": ..., "num_speculative_tokens": ...}, or leave it out'
        )


def check_contrast_length(
    contrast: Mapping[str, Any] | None, prompt_length: int, max_tokens: int, most: int | None
) -> None:
    """Refuse `contrast` of more tokens than the draft model takes; `most` is None where it takes all.

    Raises:
        ValueError: names what would work.
    """
    if contrast is not None and most is not None and prompt_length + max_tokens > most:
        raise ValueError(
            f"contrast with a prompt of {prompt_length} tokens and max_tokens={max_tokens} exceeds {most} tokens, the "
            f"most that the draft model takes; lower max_tokens, or shorten the prompt"
        )
