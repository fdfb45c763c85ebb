"""Searches by beam sampling, with drafts and without: what tables and the engines on a GPU ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

TEMPERATURE, DRAFTS = 0.7, 6  # of each layer, as many as the DSBD paper drafts at most
PLAIN = {"do_sample": True, "speculation": "off"}


class Mode(NamedTuple):
    """A search with drafts, and the one without that it is held against."""

    width: int
    options: dict[str, Any]
    plain_width: int
    plain_options: dict[str, Any] = PLAIN


def _with_drafts(width: int, draft_width: int = DRAFTS, **options: Any) -> dict[str, Any]:
    return {"do_sample": True, "draft_width": max(draft_width, width), **options}


MODES: dict[str, Mode] = {
    **{f"beam sampling, {width}": Mode(width, _with_drafts(width), width) for width in (1, 2, 4)},
    "with replacement, 4": Mode(4, _with_drafts(4, replacement=True), 4, PLAIN | {"replacement": True}),
    "dynamic width, 1 to 4": Mode(4, _with_drafts(4, threshold=0.7), 4),
    "dynamic width, 1 to 6": Mode(DRAFTS, _with_drafts(DRAFTS, threshold=0.7), DRAFTS),
    "one sequence": Mode(1, _with_drafts(1, draft_width=1), 1),
    "memory mode, 4, against one sequence": Mode(4, _with_drafts(4, memory_mode=True), 1),
    **{
        f"accept_top_k={best}, {width} (inexact)": Mode(
            width, _with_drafts(width, accept="top_k", accept_top_k=best), width
        )
        for width, best in ((4, 4), (4, 16))
    },
}
Params = Callable[[int], Any]  # of a seed


def sampled_params(width: int, num_tokens: int, options: dict[str, Any]) -> Params:
    """A search by these options, whatever its seed."""
    from vllm_trie import beam_params

    common = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": TEMPERATURE}
    return lambda seed: beam_params(width, seed=seed, **common, **options)
