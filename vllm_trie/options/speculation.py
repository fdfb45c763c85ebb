"""Decides from options, and from what the engine drafts by, whether and how a request speculates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from vllm_trie.options.matrix import OF_PLAIN_STEPS, options_clash
from vllm_trie.options.parts import Speculating, Speculation

Drafts = Literal["model", "ngrams"]
DRAFTS_PER_BEAM = 2  # of a layer, unless a request sets `draft_width`
MOST_DRAFTS_PER_BEAM = 4  # the most under speculation="auto", which adapts the width


def check_drafts_for_options(speculation: str | None, drafts: Drafts | None, prefix: str = "") -> None:
    """Refuse to speculate without drafts, or with drafts of the wrong kind.

    Args:
        drafts: What the engine drafts by.
        prefix: Of the option's name in the refusal.

    Raises:
        ValueError: names the option, its value and what would work.
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
            'engine drafts by n-grams; use "off" to sample beams, or "exact" for beams that are not sampled'
        )


def options_sample_beams(request: Mapping[str, Any], by_default: bool | None, speculation: Speculation | None) -> bool:
    """Whether beams are sampled: as the request says, or else as the engine says, unless that clashes.

    Args:
        by_default: The engine's `do_sample`.
        speculation: The engine's `speculation`.
    """
    if (own := request.get("speculation")) in ("exact", "sample"):
        return bool(own == "sample")
    if "do_sample" in request:
        return bool(request["do_sample"])
    return (bool(by_default) or speculation == "sample") and options_clash({**request, "do_sample": True}) is None


def resolve_speculation_options(
    request: Mapping[str, Any], by_default: Speculation | None, drafts: Drafts | None
) -> tuple[Speculation, tuple[str, ...]]:
    """How a search speculates.

    Args:
        request: Its options, with `do_sample` resolved.
        by_default: The engine's `speculation`.

    Returns:
        The resolved `speculation`, and the options of the request that have no effect as its steps take no drafts.
    """
    if drafts is not None and not request.keys().isdisjoint(OF_PLAIN_STEPS):
        return "off", ("draft_width",)
    speculation, is_sampled = request.get("speculation"), request["do_sample"]
    if speculation in ("exact", "sample"):
        return speculation, ()
    wanted = speculation or by_default
    if wanted == "off" or drafts is None or (drafts == "ngrams" and is_sampled):
        return "off", ()
    if is_sampled:
        return "sample", ()
    return "exact" if wanted == "exact" or drafts == "ngrams" else "auto", ()


def options_speculate(beam: Speculating) -> bool:
    """Whether a search with these resolved options may take several steps per forward pass."""
    return beam.speculation not in (None, "off")


def fit_layer_width_options(chosen: dict[str, Any], beam: Speculating, beam_width: int) -> None:
    """Adapt the engine's default widths to the `beam_width` of one request."""
    if "draft_width" in chosen:
        chosen["draft_width"] = max(chosen["draft_width"], beam_width)
    if "min_width" in chosen:
        chosen["min_width"] = min(chosen["min_width"], beam_width)
    if chosen.get("threshold", beam.threshold) is None:
        chosen.pop("min_width", None)


def check_layer_width_options(beam: Speculating, beam_width: int) -> None:
    """Refuse a `draft_width` or `min_width` that does not fit `beam_width`."""
    if beam.draft_width is not None and beam.draft_width < beam_width:
        raise ValueError(
            f"draft_width={beam.draft_width} is below the number of beams, {beam_width}, so that no layer could be "
            "accepted; raise it"
        )
    if beam.min_width is not None and beam.min_width > beam_width:
        raise ValueError(f"min_width={beam.min_width} exceeds the number of beams, {beam_width}; lower it")


def check_draft_width_option(beam: Speculating, vocab_size: int) -> None:
    """Refuse a `draft_width` above the vocabulary size."""
    if beam.draft_width is not None and beam.draft_width > vocab_size:
        raise ValueError(f"draft_width={beam.draft_width} exceeds the vocabulary of {vocab_size} tokens; lower it")


def check_threshold_option(beam: Speculating) -> None:
    """Refuse a `min_width` without a `threshold`."""
    if beam.min_width is not None and beam.threshold is None:
        raise ValueError(f"min_width={beam.min_width} needs a threshold, such as 0.7, to decide the width by")
