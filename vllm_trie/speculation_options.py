"""How the beams of a request are drawn, and how they speculate: the options, and what is not said decided."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_trie.params import BeamParams

SPECULATIONS = ("exact", "sample", "off")
FLAGS = ("do_sample", "replacement", "memory_mode")
EXTRAS = (  # of plain beam search, that neither drawn beams nor semantics="vllm" know
    *("prune_relative", "prune_absolute", "prune_relative_local", "max_candidates_per_parent"),
    "sample_first",
)
_OF_DRAFTS = ("draft_width",)
_OF_SAMPLED_DRAFTS = ("min_width", "threshold", "memory_mode")


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """What requests and engines may say alike; None is not said.

    Args:
        speculation: "exact" makes several steps of plain beam search per forward of the model, "sample" of beam
            sampling, by a draft model; "off" does not. By default an engine with a draft model speculates.
        do_sample: Draw the beams of each step from all continuations of all beams, by the product of their
            probabilities, instead of taking the best. Temperature and filters act on that joint distribution.
        replacement: Whether the same continuation may be drawn more than once.
        memory_mode: Of the beams that one forward leads to, only the best goes on; the others need no KV blocks.
        draft_width: Drafts per layer, at least `beam_width`; by default twice as many.
        min_width: With a threshold, the fewest beams a layer has, by default 1; `beam_width` is the most.
        threshold: Of speculative beam sampling: a layer has as many beams as are accepted with this probability.
            By default it has `beam_width`.
    """

    speculation: str | None = None
    do_sample: bool | None = None
    replacement: bool | None = None
    memory_mode: bool | None = None
    draft_width: int | None = None
    min_width: int | None = None
    threshold: float | None = None


OPTIONS = tuple(field.name for field in fields(SpeculationOptions))


def check_options(options: SpeculationOptions, prefix: str = "") -> None:
    """Check each option by itself.

    Raises:
        ValueError: naming the option, with `prefix`, its value and what would work.
    """
    speculation = options.speculation
    if speculation is not None and speculation not in SPECULATIONS:
        known = ", ".join(map(repr, SPECULATIONS))
        raise ValueError(f"{prefix}speculation={speculation!r} is unknown; known: {known}")
    for name in FLAGS:
        flag = getattr(options, name)
        if not isinstance(flag, bool | None):
            raise ValueError(f"{prefix}{name}={flag!r} is neither true nor false")
    for name in ("draft_width", "min_width"):
        width = getattr(options, name)
        if width is not None and (isinstance(width, bool) or not isinstance(width, int) or width < 1):
            raise ValueError(f"{prefix}{name}={width!r} is not a number of beams; pass an integer >= 1")
    threshold = options.threshold
    if threshold is not None and not (_is_number(threshold) and 0 < threshold <= 1):
        raise ValueError(f"{prefix}threshold={threshold!r} is not a probability; pass a number in (0, 1]")
    for do_sample, other, right in ((True, "exact", "sample"), (False, "sample", "exact")):
        if options.do_sample is do_sample and speculation == other:
            raise ValueError(
                f'{prefix}do_sample={do_sample} and {prefix}speculation="{other}" exclude each other; '
                f'use speculation="{right}"'
            )


def check_together(beam: BeamParams) -> None:
    """Refuse options that exclude each other, or that have nothing to act on.

    Raises:
        ValueError: naming both, and what would work.
    """
    check_options(beam)
    if beam.replacement and (beam.do_sample is False or beam.speculation == "exact"):
        raise ValueError("replacement=True has nothing to draw; set do_sample=True")
    if beam.do_sample or beam.speculation == "sample":
        if beam.semantics != "hf":
            raise ValueError(f'semantics="{beam.semantics}" does not draw beams; leave do_sample out, or use "hf"')
        for name in EXTRAS:
            if value := getattr(beam, name):
                raise ValueError(f"{name}={value!r} is not supported together with do_sample; leave one of them out")
    for name in (*_OF_DRAFTS, *_OF_SAMPLED_DRAFTS):
        value = getattr(beam, name)
        if value is not None and value is not False and beam.speculation == "off":
            raise ValueError(f"{name}={value!r} has no drafts to act on: this search does not speculate; leave it out")
    for name in _OF_SAMPLED_DRAFTS:
        value = getattr(beam, name)
        if value is not None and value is not False and (beam.speculation == "exact" or beam.do_sample is False):
            raise ValueError(f'{name}={value!r} means nothing where beams are not drawn; set speculation="sample"')
    if beam.draft_width is not None and beam.draft_width < beam.beam_width:
        raise ValueError(
            f"draft_width={beam.draft_width} is below beam_width={beam.beam_width}, so that no layer could be "
            f"accepted; raise it"
        )
    if beam.min_width is not None and beam.min_width > beam.beam_width:
        raise ValueError(f"min_width={beam.min_width} exceeds beam_width={beam.beam_width}; lower it")


def check_drafts(speculation: str | None, has_drafts: bool, prefix: str = "") -> None:
    """Refuse to speculate without a draft model.

    Raises:
        ValueError: naming the option, with `prefix`, and what would work.
    """
    if speculation in ("exact", "sample") and not has_drafts:
        raise ValueError(
            f'{prefix}speculation="{speculation}" needs a draft model; start the engine with speculative_config='
            '{"method": "draft_model", "model": ..., "num_speculative_tokens": ...}'
        )


def resolve(beam: BeamParams, defaults: SpeculationOptions, has_drafts: bool) -> BeamParams:
    """What a request and its engine together ask for: `speculation` and `do_sample`, and what else applies to them.

    Args:
        beam: What the request asks for.
        defaults: What the engine says. Where its word to draw meets a search that cannot, that search remains what
            it is.
        has_drafts: Whether the engine has a draft model.

    Raises:
        ValueError: the request wants drafts that there are none of, or says how to draw, or how wide layers are,
            where nothing is drawn or decides it.
    """
    speculation, do_sample = beam.speculation, beam.do_sample
    check_drafts(speculation, has_drafts)
    if speculation in ("exact", "sample"):
        do_sample = speculation == "sample"
    elif do_sample is None:
        may_draw = beam.semantics == "hf" and not any(getattr(beam, name) for name in EXTRAS)
        do_sample = may_draw and (bool(defaults.do_sample) or defaults.speculation == "sample")
    if speculation is None:
        is_on = has_drafts and defaults.speculation != "off"
        speculation = ("sample" if do_sample else "exact") if is_on else "off"
    applicable = ("replacement",) * do_sample
    applicable += _OF_DRAFTS * (speculation != "off") + _OF_SAMPLED_DRAFTS * (speculation == "sample")
    chosen = {name: getattr(defaults, name) for name in applicable if getattr(beam, name) is None}
    if chosen.get("draft_width") is not None:
        chosen["draft_width"] = max(chosen["draft_width"], beam.beam_width)
    if chosen.get("min_width") is not None:
        chosen["min_width"] = min(chosen["min_width"], beam.beam_width)
    if chosen.get("threshold", beam.threshold) is None:
        chosen.pop("min_width", None)
    resolved = replace(beam, speculation=speculation, do_sample=do_sample, **chosen)
    if resolved.min_width is not None and resolved.threshold is None:
        raise ValueError(f"min_width={resolved.min_width} needs a threshold, such as 0.7, to decide the width by")
    return resolved


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
