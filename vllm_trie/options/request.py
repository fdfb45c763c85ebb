"""The beam options of one request."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Field

from vllm_trie.options.other_names import did_you_mean, meant_by
from vllm_trie.options.speculation import SpeculationOptions
from vllm_trie.options.table import (
    BEST_OF_HF,
    CATALOG,
    DRAFTS,
    DRAWN,
    DRAWN_DRAFTS,
    HF,
    PLAIN,
    STEPS,
    Number,
    about,
    choices,
    option,
)
from vllm_trie.search.stopping import EarlyStopping

MOST_PENALTY = 6  # a million tokens to this power still fit float32
MOST_NGRAM = 64  # tokens, which are compared one by one in every step
MOST_SEQUENCES, MOST_SEQUENCE_TOKENS = 100_000, 2_000_000  # in a request; more make a catalog

Semantics = Literal["hf", "vllm", "tridecode"]

# What is said of a value out of range, after the option and the value.
_RATIO = "is not a ratio of probabilities; pass a number in (0, 1]"
_DIFFERENCE = "is not a difference of log-probabilities; pass a number >= 0"
_WAYS = "is not a number of continuations; pass an integer >= 1"
_NGRAM = f"is not a number of tokens; pass an integer from 0 to {MOST_NGRAM}"
_TOKENS = "is not a number of tokens; pass an integer >= 0"
_SEQUENCES = f"is not a list of 1 to {MOST_SEQUENCES:,} strings, or lists of token ids"
NO_SCORER = "is not a scorer; pass a callable, an `LLM` of a pooling model, or the name or URL of an endpoint"
_EXPONENT = f"is not a number above -{MOST_PENALTY} and below {MOST_PENALTY}; 1.0 compares means, 0.0 sums"

# That may be options of others, where there is no beam_width.
_COMMON_WORDS = {"threshold", "replacement", "unit", "scorer", "candidates", "max_steps"}
_ENDS = {"vllm": "at max_tokens", "tridecode": "one step after beam_width hypotheses are finished"}
_OF_STEPS = {"beam_width", "early_stopping", "unit"}
_OF_BEAMS = re.compile("beam|divers")  # nobody else's names


class BeamParams(SpeculationOptions):
    """The beam options of one request, as they stand in `SamplingParams.extra_args`.

    Args:
        beam_width: Beams searched side by side; `n` of them come back. One beam is greedy search.
        beam_widths: Beams after each step, the first ones; the last number goes on. The greatest is the `beam_width`,
            which may be left out: so many hypotheses compete in the end.
        num_beam_groups: Group beam search: the beams are in so many groups of equal width, each of which avoids what
            the groups before it take in the same step. As transformers 4's `generate`.
        diversity_penalty: What each beam of the groups before it that takes a token takes off that token's
            log-probability.
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
        no_repeat_ngram_size: No hypothesis has an n-gram of this many tokens twice, the prompt's n-grams among them; 0
            lets it repeat any. As transformers' `generate`.
        stochastic: Draw whole hypotheses without replacement, in the order in which they come back, by stochastic beam
            search: the probability of each is the model's, at this temperature and after filters.
        compact: Return all hypotheses, `beam_width` of them, as arrays in the one output of the request (`n=1`), which
            `vllm_trie.hypotheses` reads.
        catalog: The engine's catalog along whose items beams go; each hypothesis is one of them. See docs/catalogs.md.
        allowed_sequences: The items themselves, strings or lists of token ids, instead of a catalog's name; in
            `extra_args` and `vllm_xargs` also as a JSON text. 2,000,000 tokens in all at most.
        catalog_items: Items of a hypothesis, one after the other.
        catalog_after: Let hypotheses begin freely; the items come after this token, an id or its text.
        catalog_stop: Whether a stop token must follow the last item, with its log-probability; otherwise the item
            itself ends the hypothesis.
        catalog_renormalize: Let each row's log-probabilities be those among what the catalog allows, not the model's.
        unit: What beams grow by: "token", or "step", a text up to a delimiter, drawn and then scored. See
            docs/step_search.md.
        step_stop: The delimiters that end a step, which keeps them.
        scorer: What gives each candidate its score: a callable, vLLM's `LLM` of a pooling model, or an endpoint: the
            name of one of the engine's `scorers`, or offline its URL.
        candidates: Steps that are drawn per beam: in each round `beam_width` times as many in all.
        max_steps: Rounds; in the last one candidates go on to their end. By default as many as it takes.
    """

    beam_width: int = option(..., "is not a whole number of beams; pass an integer of at least 1", ge=1)
    beam_widths: list[Annotated[int, Field(ge=1)]] | None = option(
        None, "is not a list of numbers of beams; pass integers >= 1", BEST_OF_HF, min_length=1
    )
    num_beam_groups: int = option(1, "is not a number of groups; pass an integer >= 1", BEST_OF_HF, ge=1)
    diversity_penalty: Number = option(0.0, _DIFFERENCE, "`num_beam_groups`", ge=0, lt=math.inf)
    length_penalty: Number = option(1.0, _EXPONENT, gt=-MOST_PENALTY, lt=MOST_PENALTY)
    early_stopping: EarlyStopping = option(False, 'is none of False, True and "never"', HF)
    semantics: Semantics | None = option(None)
    prune_relative: Number | None = option(None, _RATIO, PLAIN, gt=0, le=1)
    prune_absolute: Number | None = option(None, _DIFFERENCE, PLAIN, ge=0, lt=math.inf)
    prune_relative_local: Number | None = option(None, _RATIO, PLAIN, gt=0, le=1)
    max_candidates_per_parent: int | None = option(None, _WAYS, PLAIN, ge=1)
    sample_first: int = option(0, _TOKENS, PLAIN, ge=0)
    no_repeat_ngram_size: int = option(0, _NGRAM, ge=0, le=MOST_NGRAM)
    stochastic: bool = option(False, goes_with=DRAWN)
    compact: bool = option(False)
    catalog: str | None = option(None, "is not the name of a catalog; pass a string", BEST_OF_HF)
    allowed_sequences: list[str] | list[list[int]] | None = option(
        None, _SEQUENCES, BEST_OF_HF, min_length=1, max_length=MOST_SEQUENCES
    )
    catalog_items: int = option(1, "is not a number of items; pass an integer >= 1", CATALOG, ge=1)
    catalog_after: int | str | None = option(None, "is not a token; pass its id or its text", CATALOG)
    catalog_stop: bool = option(False, goes_with=CATALOG)
    catalog_renormalize: bool = option(False, goes_with=CATALOG)
    unit: Literal["token", "step"] = option("token")
    step_stop: list[Annotated[str, Field(min_length=1)]] | None = option(
        None, "is not a list of delimiters; pass strings", STEPS, min_length=1
    )
    scorer: Any = option(None, NO_SCORER, STEPS)
    candidates: int = option(4, "is not a number of candidates; pass an integer >= 1", STEPS, ge=1)
    max_steps: int | None = option(None, "is not a number of steps; pass an integer >= 1", STEPS, ge=1)

    def __init__(self, **given: Any) -> None:
        widths = given.get("beam_widths")
        if widths is not None and given.get("beam_width") is None:
            are_numbers = isinstance(widths, list) and all(type(width) is int for width in widths)
            given["beam_width"] = max(widths, default=1) if are_numbers else 1
            given["beam_width"] = max(given["beam_width"], 1)
        super().__init__(**given)

    @property
    def draws(self) -> bool:
        """Whether something is drawn."""
        return bool(self.sample_first or self.do_sample or self.speculation == "sample")

    @property
    def drawn_by(self) -> str:
        """The option that makes beams be drawn together, where they are."""
        return "do_sample" if self.do_sample else 'speculation="sample"'

    def num_beams_along(self, num_items: int, num_stop_tokens: int) -> int:
        """How many beams can live along a catalog, at most `beam_width`: no two of them are alike.

        Args:
            num_items: Of the catalog.
            num_stop_tokens: One of which follows the last item, under `catalog_stop`.
        """
        if self.catalog_after is not None:
            return self.beam_width
        exponent = min(self.catalog_items, self.beam_width.bit_length())  # with which 2 exceeds beam_width
        num_hypotheses = num_items**exponent
        return min(self.beam_width, num_hypotheses * (num_stop_tokens if self.catalog_stop else 1))

    @property
    def by_steps(self) -> bool:
        """Whether beams grow by steps."""
        return self.unit == "step"

    @property
    def has_items(self) -> bool:
        """Whether beams go along a catalog."""
        return self.catalog is not None or self.allowed_sequences is not None

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> BeamParams | None:
        """The beam options among `extra_args`, or None if there are none.

        Keys that belong to others pass, and so do common words without a `beam_width`. Refused are our options without
        a `beam_width`, and other names for them.

        Raises:
            ValueError: naming the option, its value and what would work.
        """
        extra_args = extra_args or {}
        refuse_other_names(extra_args, asks_for_beams(extra_args))
        given = {name: extra_args[name] for name in cls.model_fields if name in extra_args}
        if not asks_for_beams(given):
            if given.keys() <= _COMMON_WORDS:
                return None
            raise ValueError(f"{', '.join(given)} given without beam_width; add beam_width to search with beams")
        for name, value in given.items():
            if type(value) is int and True in choices(cls.model_fields[name]):  # so the OpenAI server sends booleans
                given[name] = {0: False, 1: True}.get(value, value)
        if isinstance(sequences := given.get("allowed_sequences"), str):  # there it sends no lists of lists
            with suppress(ValueError, RecursionError):
                given["allowed_sequences"] = json.loads(sequences)
        return cls(**given)

    def check_together(self) -> None:
        """Refuse options that exclude each other, or that have nothing to act on."""
        super().check_together()
        self._refuse(not self.by_steps, STEPS, 'needs unit="step"; add it, or leave it out')
        if self.by_steps:
            self._check_steps()
            return
        draws, semantics = self.do_sample or self.speculation == "sample", self.semantics
        never_draws = self.do_sample is False or self.speculation == "exact"
        self._refuse(never_draws, DRAWN, "has nothing to draw; set do_sample=True")
        if draws and semantics not in (None, "hf"):
            raise ValueError(f'semantics="{semantics}" does not draw beams; leave {self.drawn_by} out, or use "hf"')
        self._refuse(draws, PLAIN, f"is not supported together with {self.drawn_by}; leave one of them out")
        for drafts in (DRAFTS, DRAWN_DRAFTS):
            why = "has no drafts to act on: this search does not speculate; leave it out"
            self._refuse(self.speculation == "off", drafts, why)
        why = 'means nothing where beams are not drawn; set speculation="sample"'
        self._refuse(never_draws, DRAWN_DRAFTS, why)
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
        self._refuse(semantics == "vllm", PLAIN, why)
        self._check_best_of_hf(bool(draws))
        self._check_groups()
        self._check_stochastic()

    def _check_stochastic(self) -> None:
        """Refuse what decides nothing where whole hypotheses are drawn."""
        others = {"replacement": None, "length_penalty": 1.0, "early_stopping": False, "memory_mode": None}
        for name, neutral in others.items() if self.stochastic else ():
            if (value := getattr(self, name)) != neutral and value is not False:
                raise ValueError(f"{name}={value!r} is not supported together with stochastic; leave one of them out")
        if self.stochastic and self.speculation in ("exact", "sample"):
            raise ValueError(
                f'speculation="{self.speculation}" is not supported together with stochastic; leave one of them out'
            )

    def _check_groups(self) -> None:
        """Refuse groups that beams do not fill, or that are all alike."""
        groups, penalty = self.num_beam_groups, self.diversity_penalty
        if self.beam_width % groups:
            raise ValueError(
                f"num_beam_groups={groups} does not divide beam_width={self.beam_width}; make it a multiple"
            )
        if groups > 1 and penalty == 0:
            raise ValueError(f"num_beam_groups={groups} needs a diversity_penalty above 0, or all groups are alike")
        if groups == 1 and penalty > 0:
            raise ValueError(f"diversity_penalty={penalty} needs groups that differ; set num_beam_groups")

    def _check_steps(self) -> None:
        """Refuse what a search by steps has no use for, and the lack of what it needs."""
        if self.step_stop is None or self.scorer is None:
            lacking = "scorer" if self.step_stop else "step_stop"
            raise ValueError(
                f'unit="step" needs {lacking}; pass one, as in step_stop=["\\n\\n"], scorer=score (over HTTP: a name '
                "among the engine's scorers)"
            )
        for name, field in type(self).model_fields.items():
            value, is_of_steps = getattr(self, name), name in _OF_STEPS or about(field, "goes_with") == STEPS
            if not is_of_steps and value is not False and value not in (field.default, None, "off"):
                what = name if name == "allowed_sequences" else f"{name}={value!r}"
                raise ValueError(f'{what} is not supported together with unit="step", which draws steps; leave it out')
        if self.early_stopping == "never":
            raise ValueError('early_stopping="never" means nothing under unit="step": no score is a bound; use False')

    def _check_best_of_hf(self, draws: bool) -> None:
        """Refuse what does not go with a catalog or with several widths."""
        self._refuse(not self.has_items, CATALOG, "needs a catalog or allowed_sequences; add one, or leave it out")
        if self.catalog is not None and self.allowed_sequences is not None:
            raise ValueError(
                f"catalog={self.catalog!r} and allowed_sequences exclude each other; leave one of them out"
            )
        if self.beam_widths is not None and self.beam_width != max(self.beam_widths):
            raise ValueError(
                f"beam_width={self.beam_width} is not the greatest of beam_widths={self.beam_widths}; leave it out"
            )
        others = {self.drawn_by: draws, f"sample_first={self.sample_first}": self.sample_first > 0}
        others[f'semantics="{self.semantics}"'] = self.semantics not in (None, "hf")
        for name, value in self.asks_for(BEST_OF_HF).items():
            what = name if name == "allowed_sequences" else f"{name}={value!r}"
            if name in ("beam_widths", "num_beam_groups"):
                others['speculation="exact"'] = self.speculation == "exact"
            if name == "num_beam_groups":
                others |= {"beam_widths": self.beam_widths is not None, "a catalog": self.has_items}
            for other in (other for other, is_given in others.items() if is_given):
                raise ValueError(f"{what} is not supported together with {other}; leave one of them out")

    def asks_for(self, goes_with: str) -> dict[str, Any]:
        """Of the options that go with something, those that are given, and not as what holds without them."""
        values = {name: getattr(self, name) for name in that_go_with(goes_with)}
        return {n: v for n, v in values.items() if v is not False and v != type(self).model_fields[n].default}

    def _refuse(self, applies: bool | None, goes_with: str, why: str) -> None:
        for name, value in self.asks_for(goes_with).items() if applies else ():
            raise ValueError(f"{name}={value!r} {why}")


def asks_for_beams(extra_args: Mapping[str, Any]) -> bool:
    """Whether these ask for a search."""
    return "beam_width" in extra_args or "beam_widths" in extra_args


def refuse_other_names(given: Mapping[str, Any], is_beam_request: bool = True) -> None:
    """Refuse keys that are other names for beam options, or all but spell one.

    Args:
        is_beam_request: Otherwise names that others may use for something else pass.

    Raises:
        ValueError: naming the key, its value and what to use here.
    """
    options = BeamParams.model_fields
    for name, value in given.items():
        meant = None if name in options else meant_by(str(name), options)
        is_ours = (meant in options and meant not in _COMMON_WORDS) or _OF_BEAMS.search(str(name))
        if meant is not None and (is_beam_request or is_ours):
            raise ValueError(f"unknown option {name}={value!r}; {did_you_mean(meant)}")


def that_go_with(*what: str) -> list[str]:
    """The options that go with any of these."""
    return [name for name, field in BeamParams.model_fields.items() if about(field, "goes_with") in what]
