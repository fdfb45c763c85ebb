"""All options of beam search: the name, type, range, default and meaning of each, and what it goes with.

From this table come the checks of requests (`BeamParams`) and of engines (`TrieBeamConfig`), the signature of
`vllm_trie.beam_params`, and the tables of docs/options.md.
"""

from __future__ import annotations

import inspect
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from vllm_trie.search.stopping import EarlyStopping

PLUGIN_NAME = "trie_beam"
MOST_PENALTY = 6  # a million tokens to this power still fit float32

Semantics = Literal["hf", "vllm", "tridecode"]
Number = int | float

# What is said of a value out of range, after the option and the value.
_BEAMS = "is not a number of beams; pass an integer >= 1"
_RATIO = "is not a ratio of probabilities; pass a number in (0, 1]"
_DIFFERENCE = "is not a difference of log-probabilities; pass a number >= 0"
_WAYS = "is not a number of continuations; pass an integer >= 1"
_TOKENS = "is not a number of tokens; pass an integer >= 0"
_EXPONENT = f"is not a number between -{MOST_PENALTY} and {MOST_PENALTY}; 1.0 compares means, 0.0 sums"

# What an option goes with.
_HF = '`semantics="hf"`'
_PLAIN = 'neither `do_sample` nor `semantics="vllm"`'
_DRAWN = "`do_sample`"
_DRAFTS = "`speculation`"
_DRAWN_DRAFTS = '`speculation="sample"`'


def _option(default: Any, wrong: str = "", goes_with: str = "", **bounds: Any) -> Any:
    """A row of the table; its meaning stands in the docstring of its class."""
    return Field(default, json_schema_extra={"wrong": wrong, "goes_with": goes_with}, **bounds)


class _Options(BaseModel):
    """Options that are checked one by one, and then together.

    Raises:
        ValueError: naming the option, its value and what would work.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    prefix: ClassVar[str] = ""  # of the names in a refusal

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            field = type(self).model_fields.get(name)
            if field is None:
                raise ValueError(f"unknown option {self.prefix}{name}; {self._cure(name)}") from None
            raise ValueError(f"{self.prefix}{name}={given.get(name)!r} {_wrong(field)}") from None
        self.check_together()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for name, meaning in re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", inspect.cleandoc(cls.__doc__ or ""), re.M):
            cls.model_fields[name].description = " ".join(meaning.split())

    def check_together(self) -> None:
        """Refuse options that exclude each other."""

    @classmethod
    def _cure(cls, name: str) -> str:
        known = cls.model_fields
        meant = _meant(name, [*known, *BeamParams.model_fields], cutoff=0.6)
        if meant is None:
            return f"known: {', '.join(known)}"
        if meant in known or " " in meant:
            return _did_you_mean(meant)
        return f"{meant} is for requests, each of which has its own"


class SpeculationOptions(_Options):
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
        threshold: A layer has as many beams as are accepted with this probability. By default it has `beam_width`.
    """

    speculation: Literal["exact", "sample", "off"] | None = _option(None)
    do_sample: bool | None = _option(None, goes_with=_HF)
    replacement: bool | None = _option(None, goes_with=_DRAWN)
    memory_mode: bool | None = _option(None, goes_with=_DRAWN_DRAFTS)
    draft_width: int | None = _option(None, _BEAMS, _DRAFTS, ge=1)
    min_width: int | None = _option(None, _BEAMS, _DRAWN_DRAFTS, ge=1)
    threshold: Number | None = _option(None, "is not a probability; pass a number in (0, 1]", _DRAWN_DRAFTS, gt=0, le=1)

    def check_together(self) -> None:
        """Refuse to draw and not to draw."""
        for do_sample, other, right in ((True, "exact", "sample"), (False, "sample", "exact")):
            if self.do_sample is do_sample and self.speculation == other:
                raise ValueError(
                    f'{self.prefix}do_sample={do_sample} and {self.prefix}speculation="{other}" exclude each other; '
                    f'use speculation="{right}"'
                )


class BeamParams(SpeculationOptions):
    """The beam options of one request, as they stand in `SamplingParams.extra_args`.

    Args:
        beam_width: Beams searched side by side; `n` of them come back. One beam is greedy search.
        length_penalty: Hypotheses compete by cumulative log-probability / length to this power: > 0 favours long ones.
        early_stopping: When `beam_width` hypotheses are finished, True stops; False goes on while the best running
            beam, at its present length, can beat one of them; "never" while it can at any length. As transformers'
            `generate`. One beam always stops at the first stop token.
        semantics: Whose rules decide what may finish and when to stop: "hf" is transformers' `generate`, "vllm" is
            vLLM's `LLM.beam_search`, "tridecode" is the published code of Efficient Beam Search for LLMs Using
            Trie-Based Decoding. By default the engine's.
        prune_relative: Drop a continuation less than this many times as probable as the best of all beams.
        prune_absolute: Drop a continuation whose cumulative log-probability trails the best by more nats.
        prune_relative_local: Drop a continuation whose last token is less than this many times as probable as the most
            probable one after any beam.
        max_candidates_per_parent: Continue each beam in at most this many ways.
        sample_first: Draw this many tokens for each beam, by itself and with replacement, before the search begins. A
            beam that draws a stop is finished; beams that draw alike stay alike.
    """

    beam_width: int = _option(..., "is not a whole number of beams; pass an integer of at least 1", ge=1)
    length_penalty: Number = _option(1.0, _EXPONENT, gt=-MOST_PENALTY, lt=MOST_PENALTY)
    early_stopping: EarlyStopping = _option(False, 'is none of False, True and "never"', _HF)
    semantics: Semantics | None = _option(None)
    prune_relative: Number | None = _option(None, _RATIO, _PLAIN, gt=0, le=1)
    prune_absolute: Number | None = _option(None, _DIFFERENCE, _PLAIN, ge=0, lt=math.inf)
    prune_relative_local: Number | None = _option(None, _RATIO, _PLAIN, gt=0, le=1)
    max_candidates_per_parent: int | None = _option(None, _WAYS, _PLAIN, ge=1)
    sample_first: int = _option(0, _TOKENS, _PLAIN, ge=0)

    @property
    def draws(self) -> bool:
        """Whether something is drawn."""
        return bool(self.sample_first or self.do_sample or self.speculation == "sample")

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> BeamParams | None:
        """The beam options among `extra_args`, or None if there are none.

        Keys that belong to others pass, and so do common words without a `beam_width`. Refused are our options without
        a `beam_width`, and other names for them.

        Raises:
            ValueError: naming the option, its value and what would work.
        """
        extra_args = extra_args or {}
        refuse_other_names(extra_args, "beam_width" in extra_args)
        given = {name: extra_args[name] for name in cls.model_fields if name in extra_args}
        if "beam_width" not in given:
            if given.keys() <= _COMMON_WORDS:
                return None
            raise ValueError(f"{', '.join(given)} given without beam_width; add beam_width to search with beams")
        for name, value in given.items():
            if type(value) is int and True in choices(cls.model_fields[name]):  # so the OpenAI server sends booleans
                given[name] = {0: False, 1: True}.get(value, value)
        return cls(**given)

    def check_together(self) -> None:
        """Refuse options that exclude each other, or that have nothing to act on."""
        super().check_together()
        draws, semantics = self.do_sample or self.speculation == "sample", self.semantics
        never_draws = self.do_sample is False or self.speculation == "exact"
        self._refuse(never_draws, _DRAWN, "has nothing to draw; set do_sample=True")
        if draws and semantics not in (None, "hf"):
            raise ValueError(f'semantics="{semantics}" does not draw beams; leave do_sample out, or use "hf"')
        self._refuse(draws, _PLAIN, "is not supported together with do_sample; leave one of them out")
        for drafts in (_DRAFTS, _DRAWN_DRAFTS):
            why = "has no drafts to act on: this search does not speculate; leave it out"
            self._refuse(self.speculation == "off", drafts, why)
        why = 'means nothing where beams are not drawn; set speculation="sample"'
        self._refuse(never_draws, _DRAWN_DRAFTS, why)
        if self.draft_width is not None and self.draft_width < self.beam_width:
            raise ValueError(
                f"draft_width={self.draft_width} is below beam_width={self.beam_width}, so that no layer could be "
                f"accepted; raise it"
            )
        if self.min_width is not None and self.min_width > self.beam_width:
            raise ValueError(f"min_width={self.min_width} exceeds beam_width={self.beam_width}; lower it")
        if self.early_stopping is not False and semantics in _ENDS:
            raise ValueError(
                f'early_stopping={self.early_stopping!r} means nothing under semantics="{semantics}", which ends '
                f'{_ENDS[semantics]}; leave it False, or use semantics="hf"'
            )
        why = 'is not supported under semantics="vllm", which does as vLLM does; leave it out, or use semantics="hf"'
        self._refuse(semantics == "vllm", _PLAIN, why)

    def asks_for(self, goes_with: str) -> dict[str, Any]:
        """Of the options that go with something, those that are given, and not as what holds without them."""
        values = {name: getattr(self, name) for name in _that_go_with(goes_with)}
        return {n: v for n, v in values.items() if v is not False and v != type(self).model_fields[n].default}

    def _refuse(self, applies: bool | None, goes_with: str, why: str) -> None:
        for name, value in self.asks_for(goes_with).items() if applies else ():
            raise ValueError(f"{name}={value!r} {why}")


_COMMON_WORDS = {"threshold", "replacement"}  # that may be options of others, where there is no beam_width
_ENDS = {"vllm": "at max_tokens", "tridecode": "one step after beam_width hypotheses are finished"}


class TrieBeamConfig(SpeculationOptions):
    """The options of one engine.

    Those of `SpeculationOptions` are for requests that say nothing of them, as far as they apply to what these ask for.

    Args:
        reclaim_interval: Steps between two returns of a group's dead blocks to vLLM's pool. They go back earlier when
            free blocks run low, and in any case when the group ends.
        max_beam_width: The widest search a request may ask for; `max_num_seqs` limits it in any case.
        semantics: What requests get that name no semantics.
        check_invariants: Check every trie after every step; for tests and bug reports, slow.
        debug_rank_check: Let tensor parallel ranks compare what they decide in every step, and end the engine if they
            differ; for tests and bug reports, slow.
        vllm_check: What a vLLM that differs from the recorded one leads to: "strict", to a refusal; "warn", to a
            warning where what differs may still fit; "off", to nothing. By default what `VLLM_TRIE_CHECK` says, else
            "warn".
    """

    prefix: ClassVar[str] = f"{PLUGIN_NAME}."
    reclaim_interval: int = _option(15, "is not a number of steps; pass an integer >= 1", ge=1)
    max_beam_width: int | None = _option(None, _BEAMS, ge=1)
    semantics: Semantics = _option("hf")
    check_invariants: bool = _option(False)
    debug_rank_check: bool = _option(False)
    vllm_check: Literal["strict", "warn", "off"] | None = _option(None)

    @classmethod
    def from_additional_config(cls, additional_config: Mapping[str, Any] | None) -> TrieBeamConfig:
        """Parse `additional_config["trie_beam"]`.

        Raises:
            ValueError: an unknown option, or a value out of range.
        """
        options = (additional_config or {}).get(PLUGIN_NAME, {})
        if not isinstance(options, Mapping):
            raise ValueError(f'additional_config["{PLUGIN_NAME}"]={options!r} is not a mapping of options; pass {{}}')
        return cls(**{str(name): value for name, value in options.items()})


# What a request and its engine say together.


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


def resolve(beam: BeamParams, defaults: TrieBeamConfig, has_drafts: bool) -> BeamParams:
    """What a request and its engine together ask for.

    Args:
        beam: What the request asks for.
        defaults: What the engine says. Where its word to draw meets a search that cannot, that search remains what
            it is.
        has_drafts: Whether the engine has a draft model.

    Raises:
        ValueError: the request wants drafts that there are none of, or says how to draw, or how wide layers are,
            where nothing is drawn or decides it.
    """
    check_drafts(beam.speculation, has_drafts)
    semantics, do_sample, speculation = beam.semantics or defaults.semantics, beam.do_sample, beam.speculation
    if speculation in ("exact", "sample"):
        do_sample = speculation == "sample"
    elif do_sample is None:
        may_draw = semantics == "hf" and not beam.asks_for(_PLAIN)
        do_sample = may_draw and (bool(defaults.do_sample) or defaults.speculation == "sample")
    if speculation is None:
        is_on = has_drafts and defaults.speculation != "off"
        speculation = ("sample" if do_sample else "exact") if is_on else "off"
    acting = [_DRAWN] * do_sample + [_DRAFTS] * (speculation != "off") + [_DRAWN_DRAFTS] * (speculation == "sample")
    chosen = {name: getattr(defaults, name) for name in _that_go_with(*acting) if getattr(beam, name) is None}
    if chosen.get("draft_width") is not None:
        chosen["draft_width"] = max(chosen["draft_width"], beam.beam_width)
    if chosen.get("min_width") is not None:
        chosen["min_width"] = min(chosen["min_width"], beam.beam_width)
    if chosen.get("threshold", beam.threshold) is None:
        chosen.pop("min_width", None)
    chosen |= {"semantics": semantics, "do_sample": do_sample, "speculation": speculation}
    resolved = beam.model_copy(update=chosen)
    resolved.check_together()
    if resolved.min_width is not None and resolved.threshold is None:
        raise ValueError(f"min_width={resolved.min_width} needs a threshold, such as 0.7, to decide the width by")
    return resolved


def _that_go_with(*what: str) -> list[str]:
    return [name for name, field in BeamParams.model_fields.items() if about(field, "goes_with") in what]


# What a row of the table says.


def about(field: FieldInfo, key: Literal["wrong", "goes_with"]) -> str:
    """What is said of a wrong value of an option, or what the option goes with; "" if nothing."""
    said = field.json_schema_extra
    assert isinstance(said, dict)
    return str(said[key])


def choices(field: FieldInfo) -> list[Any]:
    """The values of an option that has few of them, None left out; of others none."""
    kind: Any = field.annotation
    return [value for part in get_args(kind | None) for value in ((True, False) if part is bool else get_args(part))]


def _wrong(field: FieldInfo) -> str:
    known = choices(field)
    derived = "is neither true nor false" if True in known else f"is unknown; known: {', '.join(map(repr, known))}"
    return about(field, "wrong") or derived


# What other systems call their options.

OTHER_NAMES: dict[str, str] = tomllib.loads(Path(__file__).with_name("other_names.toml").read_text())  # here: elsewhere
_MEANT = {name: meant for meant, names in OTHER_NAMES.items() for name in names.split()}
_OF_BEAMS = re.compile("beam|divers")  # nobody else's names


def refuse_other_names(given: Mapping[str, Any], is_beam_request: bool = True) -> None:
    """Refuse keys that are other names for beam options, or all but spell one.

    Args:
        is_beam_request: Otherwise names that others may use for something else pass.

    Raises:
        ValueError: naming the key, its value and what to use here.
    """
    options = BeamParams.model_fields
    for name, value in given.items():
        meant = None if name in options else _meant(str(name), options)
        is_ours = (meant in options and meant not in _COMMON_WORDS) or _OF_BEAMS.search(str(name))
        if meant is not None and (is_beam_request or is_ours):
            raise ValueError(f"unknown option {name}={value!r}; {_did_you_mean(meant)}")


def _meant(name: str, known: Iterable[str], cutoff: float = 0.85) -> str | None:
    """Which option someone means, or a sentence that says why there is none; None: no idea."""
    word = re.sub(r"(?<=[a-z])(?=[A-Z])|-", "_", name).lower()
    return word if word in known else _MEANT.get(word) or next(iter(get_close_matches(word, known, 1, cutoff)), None)


def _did_you_mean(meant: str) -> str:
    return meant if " " in meant else f"did you mean {meant}?"
