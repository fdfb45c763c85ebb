"""The options of speculation and of drawing, which requests and engines have alike."""

from __future__ import annotations

from typing import Literal

from vllm_trie.options.table import DRAFTS, DRAWN, DRAWN_DRAFTS, HF, NO_BEAMS, Number, Options, option

Speculation = Literal["auto", "exact", "sample", "off"]
Drafts = Literal["model", "ngrams"]  # what an engine drafts by


class SpeculationOptions(Options):
    """What requests and engines may say alike; None is not said.

    Args:
        speculation: "exact" makes several steps of plain beam search per forward of the model, by a draft model or by
            n-grams, "sample" of beam sampling, by a draft model; "off" does not. "auto", the default in an engine with
            drafts that will do, is "sample" where beams are drawn; else the same as "exact", by a draft model with
            forests of the size that pays here, or none.
        do_sample: Draw the beams of each step from all continuations of all beams, by the product of their
            probabilities, instead of taking the best. Temperature and filters act on that joint distribution.
        replacement: Whether the same continuation may be drawn more than once.
        memory_mode: Of the beams that one forward leads to, only the best goes on; the others need no KV blocks.
        draft_width: Drafts per layer, at least `beam_width`; by default twice as many, under "auto" up to four times.
        min_width: With a threshold, the fewest beams a layer has, by default 1; `beam_width` is the most.
        threshold: A layer has as many beams as are accepted with this probability. By default it has `beam_width`.
    """

    speculation: Speculation | None = option(None)
    do_sample: bool | None = option(None, goes_with=HF)
    replacement: bool | None = option(None, goes_with=DRAWN)
    memory_mode: bool | None = option(None, goes_with=DRAWN_DRAFTS)
    draft_width: int | None = option(None, NO_BEAMS, DRAFTS, ge=1)
    min_width: int | None = option(None, NO_BEAMS, DRAWN_DRAFTS, ge=1)
    threshold: Number | None = option(None, "is not a probability; pass a number in (0, 1]", DRAWN_DRAFTS, gt=0, le=1)

    def check_together(self) -> None:
        """Refuse to draw and not to draw."""
        for do_sample, other, right in ((True, "exact", "sample"), (False, "sample", "exact")):
            if self.do_sample is do_sample and self.speculation == other:
                raise ValueError(
                    f'{self.prefix}do_sample={do_sample} and {self.prefix}speculation="{other}" exclude each other; '
                    f'use speculation="{right}"'
                )


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
