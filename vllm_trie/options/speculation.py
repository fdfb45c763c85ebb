"""What an engine drafts by, and which speculation that will do for."""

from __future__ import annotations

from typing import Literal

Drafts = Literal["model", "ngrams"]


def check_drafts(speculation: str | None, drafts: Drafts | None, prefix: str = "") -> None:
    """Refuse to speculate without drafts, or with drafts that do not do.

    Args:
        drafts: What the engine drafts by.
        prefix: Of the option's name.

    Raises:
        ValueError: naming the option, and what would work.
    """
    if speculation == "exact" and drafts is None:
        raise ValueError(
            f'{prefix}speculation="exact" needs drafts; start the engine with speculative_config={{"method": "ngram", '
            '"num_speculative_tokens": ...}, or with a draft model: {"method": "draft_model", "model": ..., '
            '"num_speculative_tokens": ...}'
        )
    if speculation == "sample" and drafts is None:
        raise ValueError(
            f'{prefix}speculation="sample" needs a draft model; start the engine with speculative_config='
            '{"method": "draft_model", "model": ..., "num_speculative_tokens": ...}'
        )
    if speculation == "sample" and drafts == "ngrams":
        raise ValueError(
            f'{prefix}speculation="sample" needs a draft model, by whose distribution drafts are accepted, and this '
            'engine drafts by n-grams; use speculation="off" to draw beams, or "exact" not to draw them'
        )
