"""The options of one request, for a search by tokens or by steps, and how they are parsed from `extra_args`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, TypeAlias

from pydantic.fields import FieldInfo

from vllm_trie.options.item_ids import read_item_ids
from vllm_trie.options.matrix import refuse_options
from vllm_trie.options.parts import (
    MOST_PENALTY,
    Catalogs,
    Core,
    Delivery,
    Ranking,
    RequestSampling,
    RequestSpeculating,
    Reranking,
    SequencesText,
    Steps,
)
from vllm_trie.options.shown import listed_option_names, shown_option, shown_option_name
from vllm_trie.options.speculation import check_layer_width_options
from vllm_trie.options.table import Options, did_you_mean_option, option_choices, option_fault, option_meant_by

# Other plugins may use these names, so they are ignored without a beam_width.
_COMMON_WORDS = {"accept", "threshold", "replacement", "unit", "scorer", "candidates", "max_steps", "metric"}
_COMMON_WORDS |= {"order", "exploration", "pool", "lookahead"}
MOST_KEYS = 64  # of `extra_args` in a beam request; each is compared with the names of options
# Options that the OpenAI server takes as text: it has no nested lists or objects, and parses long lists slowly.
_READ_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "phrase_boosts": json.loads,
    "contrast": json.loads,
    "exclude_items": read_item_ids,
}
_OF_BEAMS = re.compile("beam|divers")  # no other system uses such names
# What other names for the width mean, "beam_width" or a sentence that names it.
_WIDTH_MEANT = {"beam_width", option_meant_by("best_of", ())}
_N_IS_WIDTH = "with use_beam_search, n is the number of beams"


class BeamParams(RequestSpeculating, Catalogs, RequestSampling, Reranking, Delivery, Ranking, Core):
    """The options of a search by tokens in `SamplingParams.extra_args`."""

    def __init__(self, **options: Any) -> None:
        widths = options.get("beam_widths")
        if widths is not None and options.get("beam_width") is None:
            self.check_sizes({"beam_widths": widths})
            are_numbers = isinstance(widths, list) and all(type(width) is int and width < 1 << 63 for width in widths)
            options["beam_width"] = max(1, *widths) if are_numbers and widths else 1
        super().__init__(**options)

    def check(self) -> None:
        """Refuse options that clash, that have no effect, or whose numbers do not fit each other."""
        refuse_options(self.params())
        if abs(penalty := self.length_penalty) >= MOST_PENALTY and self.semantics != "vllm":
            raise ValueError(f"length_penalty={penalty} {option_fault(OPTIONS['length_penalty'])}")
        width, widths = self.beam_width, self.beam_widths
        if widths is not None and width != max(widths):
            raise ValueError(
                f"beam_width={width} is not the greatest of beam_widths={shown_option(widths)}; leave it out"
            )
        if width % self.num_beam_groups:
            raise ValueError(
                f"num_beam_groups={self.num_beam_groups} does not divide the {width} beams; pass a number that does"
            )
        check_layer_width_options(self, width)


class StepOptions(Steps, Core):
    """The options of a search by steps in `SamplingParams.extra_args`."""

    def check(self) -> None:
        """Refuse options that clash, and a search without delimiters or a scorer."""
        refuse_options(self.params())
        if self.step_stop is None or self.scorer is None:
            lacking = "scorer" if self.step_stop else "step_stop"
            raise ValueError(
                f'unit="step" needs {lacking}; pass one, as in step_stop=["\\n\\n"], scorer=score (over HTTP: a name '
                "among the engine's scorers)"
            )


SearchParams: TypeAlias = BeamParams | StepOptions

PARTS: dict[str, type[Options]] = {
    "core": Core,
    "ranking": Ranking,
    "sampling": RequestSampling,
    "catalogs": Catalogs,
    "delivery": Delivery,
    "reranking": Reranking,
    "steps": Steps,
    "speculation": RequestSpeculating,
}
OPTIONS: dict[str, FieldInfo] = {n: field for part in PARTS.values() for n, field in part.model_fields.items()}


def kind_by_options(options: Mapping[str, Any]) -> type[SearchParams]:
    """The class of these options, by their `unit`."""
    return StepOptions if options.get("unit") == "step" else BeamParams


def options_of_search(options: Mapping[str, Any]) -> SearchParams:
    """Check the options of one search.

    Raises:
        ValueError: names the option, its value and what would work.
    """
    kind = kind_by_options(options)
    params = kind(**{name: value for name, value in options.items() if name in kind.model_fields})
    others = options.keys() - kind.model_fields.keys()
    refuse_options(
        {name: options[name] for name in others if _is_set(options[name], OPTIONS[name].default)}
        | {"unit": params.unit}
    )
    return params


def _is_set(value: Any, default: Any) -> bool:
    """Whether a value differs from the default; arrays do, and compare item by item."""
    return hasattr(value, "__array__") or value != default


def parse_options(extra_args: Mapping[str, Any] | None) -> SearchParams | None:
    """The options of beam search among `extra_args`, or None if there are none.

    Keys of others are ignored, and so are common words without a `beam_width`. Refused are options of beam search
    without a `beam_width`, and other names for them.

    Raises:
        ValueError: names the option, its value and what would work.
    """
    if not extra_args:
        return None
    refuse_other_option_names(extra_args, options_ask_for_beams(extra_args))
    options = {name: extra_args[name] for name in OPTIONS if name in extra_args}
    if not options_ask_for_beams(options):
        if options.keys() <= _COMMON_WORDS:
            return None
        raise ValueError(f"{listed_option_names(options)} given without beam_width; add it to search with beams")
    for name, value in options.items():
        if type(value) is int and True in option_choices(OPTIONS[name]):  # the OpenAI server sends booleans as integers
            options[name] = {0: False, 1: True}.get(value, value)
    for part in PARTS.values():  # before texts are parsed, even of options of the other kind
        part.check_sizes(options)
    for name in _READ_FROM_TEXT.keys() & kind_by_options(options).model_fields.keys():
        if isinstance(text := options.get(name), str):
            with suppress(ValueError, RecursionError):
                options[name] = _READ_FROM_TEXT[name](text)
    if isinstance(text := options.get("allowed_sequences"), str) and kind_by_options(options) is BeamParams:
        options["allowed_sequences"] = SequencesText(text)
    return options_of_search(options)


def options_ask_for_beams(extra_args: Mapping[str, Any]) -> bool:
    """Whether these options ask for beam search."""
    return "beam_width" in extra_args or "beam_widths" in extra_args


def refuse_other_option_names(names: Mapping[str, Any], is_beam_request: bool = True, n_is_width: bool = False) -> None:
    """Refuse keys that are other systems' names for beam options, or misspell one.

    Args:
        is_beam_request: If not, names that others may use for something else are ignored.
        n_is_width: Whether the width is `n`, as with `use_beam_search`.

    Raises:
        ValueError: names the key, its value and what to use instead.
    """
    if is_beam_request and len(names) > MOST_KEYS:
        raise ValueError(f"{len(names):,} options are more than the {MOST_KEYS} that a beam request may have")
    for name, value in islice(names.items(), MOST_KEYS):  # ordinary requests may have any number, of others
        meant = None if name in OPTIONS else option_meant_by(str(name), OPTIONS)
        is_ours = (meant in OPTIONS and meant not in _COMMON_WORDS) or _OF_BEAMS.search(str(name))
        if meant is not None and (is_beam_request or is_ours):
            cure = _N_IS_WIDTH if n_is_width and meant in _WIDTH_MEANT else did_you_mean_option(meant)
            raise ValueError(f"unknown option {shown_option_name(name)}={shown_option(value)}; {cure}")
