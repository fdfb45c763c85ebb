"""What a request may ask of beam search: the options, their checks, and the parameters they ride in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from vllm_trie.controls import refuse_unsupported, stop_tokens
from vllm_trie.search.filters import Pruning
from vllm_trie.search.rules import num_candidates
from vllm_trie.search.stopping import EarlyStopping
from vllm_trie.speculation_options import EXTRAS, FLAGS, SpeculationOptions, check_together
from vllm_trie.trie.blocks import least_blocks_to_start

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

SEMANTICS = ("hf", "vllm", "tridecode")
MOST_PENALTY = 6  # a million tokens to this power still fit float32


@dataclass(frozen=True)
class BeamParams(SpeculationOptions):
    """The beam options of one request, as they stand in `SamplingParams.extra_args`.

    How its beams are drawn, and speculate: see `SpeculationOptions`.

    Args:
        beam_width: Beams searched side by side, b; `SamplingParams.n` of them come back.
        length_penalty: Hypotheses compete by sum_logprobs / length**length_penalty; > 0 favours
            longer ones.
        early_stopping: False, True or "never", as transformers' `generate` reads them. One beam always
            stops at the first stop token: it is greedy search.
        semantics: Whose rules decide what may finish and when to stop: "hf" is transformers'
            `generate`, "vllm" is vLLM's `LLM.beam_search`, "tridecode" is the published code of Efficient
            Beam Search for LLMs Using Trie-Based Decoding.
        prune_relative: Drop a continuation less than this many times as probable as the best of all, in (0, 1].
        prune_absolute: Drop a continuation whose cumulative log-probability trails the best by more nats, >= 0.
        prune_relative_local: Drop a continuation whose last token is less than this many times as
            probable as the most probable one after any beam, in (0, 1].
        max_candidates_per_parent: Continue each beam in at most this many ways.
        sample_first: Tokens that are drawn for each beam, by itself, before the search begins.
    """

    beam_width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    semantics: str = "hf"
    prune_relative: float | None = None
    prune_absolute: float | None = None
    prune_relative_local: float | None = None
    max_candidates_per_parent: int | None = None
    sample_first: int = 0

    def __post_init__(self) -> None:
        width = self.beam_width
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise ValueError(f"beam_width={width!r} is not a whole number of beams; pass an integer of at least 1")
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not abs(penalty) < MOST_PENALTY:
            raise ValueError(
                f"length_penalty={penalty!r} is not a number between -{MOST_PENALTY} and {MOST_PENALTY}; "
                f"1.0 compares means, 0.0 sums"
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f'early_stopping={self.early_stopping!r} is none of False, True and "never"')
        if self.semantics not in SEMANTICS:
            raise ValueError(f"semantics={self.semantics!r} is unknown; known: {', '.join(map(repr, SEMANTICS))}")
        end = {"vllm": "at max_tokens", "tridecode": "one step after beam_width hypotheses are finished"}
        if self.semantics in end and self.early_stopping is not False:
            raise ValueError(
                f'early_stopping={self.early_stopping!r} means nothing under semantics="{self.semantics}", which ends '
                f'{end[self.semantics]}; leave it False, or use semantics="hf"'
            )
        for name in ("prune_relative", "prune_relative_local"):
            ratio = getattr(self, name)
            if ratio is not None and not (_is_number(ratio) and 0 < ratio <= 1):
                raise ValueError(f"{name}={ratio!r} is not a ratio of probabilities; pass a number in (0, 1]")
        trail = self.prune_absolute
        if trail is not None and not (_is_number(trail) and 0 <= trail < math.inf):
            raise ValueError(f"prune_absolute={trail!r} is not a difference of log-probabilities; pass a number >= 0")
        most = self.max_candidates_per_parent
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise ValueError(
                f"max_candidates_per_parent={most!r} is not a number of continuations; pass an integer >= 1"
            )
        drawn = self.sample_first
        if isinstance(drawn, bool) or not isinstance(drawn, int) or drawn < 0:
            raise ValueError(f"sample_first={drawn!r} is not a number of tokens; pass an integer >= 0")
        check_together(self)
        for name in EXTRAS if self.semantics == "vllm" else ():
            if (value := getattr(self, name)) != getattr(type(self), name):
                raise ValueError(
                    f'{name}={value!r} is not supported under semantics="vllm", which does as vLLM does; leave it '
                    f'out, or use semantics="hf"'
                )

    @property
    def draws(self) -> bool:
        """Whether something is drawn."""
        return bool(self.sample_first or self.do_sample or self.speculation == "sample")

    @property
    def pruning(self) -> Pruning:
        """What drops continuations."""
        return Pruning(
            self.prune_relative, self.prune_absolute, self.prune_relative_local, self.max_candidates_per_parent
        )

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None, semantics: str = "hf") -> BeamParams | None:
        """The beam options among `extra_args`, or None if there are none.

        Keys that belong to others pass, and so do common words without a `beam_width`. Keys that all but
        spell one of ours are refused, as are our options without a `beam_width`.

        Args:
            semantics: The engine's default.

        Raises:
            ValueError: naming the option, its value and what would work.
        """
        extra_args = extra_args or {}
        for key in extra_args:
            meant = _ALIASES.get(key) or next(iter(get_close_matches(str(key), _OPTIONS, n=1, cutoff=0.85)), None)
            if meant in _COMMON_WORDS and "beam_width" not in extra_args:
                continue  # no word of ours
            if key not in _OPTIONS and meant is not None:
                raise ValueError(f"unknown option {key}={extra_args[key]!r}; did you mean {meant}?")
        given = {key: extra_args[key] for key in _OPTIONS if key in extra_args}
        if not given:
            return None
        if "beam_width" not in given and given.keys() <= _COMMON_WORDS:
            return None
        if "beam_width" not in given:
            raise ValueError(f"{', '.join(given)} given without beam_width; add beam_width to search with beams")
        for name in ("early_stopping", *FLAGS):
            if type(given.get(name)) is int:  # the OpenAI server turns booleans into 0 and 1
                given[name] = {0: False, 1: True}.get(given[name], given[name])
        return cls(**{"semantics": semantics, **given})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_OPTIONS = [field.name for field in fields(BeamParams)]
_COMMON_WORDS = {"threshold", "replacement"}  # that may be options of others, where there is no beam_width
_ALIASES = {  # what others call them
    "num_beams": "beam_width",
    "early_stop": "early_stopping",
    "do_sampling": "do_sample",
    "with_replacement": "replacement",
    "speculate": "speculation",
    "speculative": "speculation",
    "num_draft": "draft_width",
    "num_drafts": "draft_width",
    "draft_beam_width": "draft_width",
    "min_beam_width": "min_width",
}


@dataclass(frozen=True)
class EngineLimits:
    """What one engine can hold, for checks before anything is scheduled."""

    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int | None  # None while the engine has not sized its KV cache
    max_beam_width: int | None = None  # what the engine's user allows
    has_window: bool = False  # attention layers may forget the prompt's first blocks


def beam_params(
    beam_width: int,
    n: int = 1,
    *,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    semantics: str | None = None,
    prune_relative: float | None = None,
    prune_absolute: float | None = None,
    prune_relative_local: float | None = None,
    max_candidates_per_parent: int | None = None,
    sample_first: int = 0,
    do_sample: bool | None = None,
    replacement: bool | None = None,
    speculation: str | None = None,
    draft_width: int | None = None,
    threshold: float | None = None,
    min_width: int | None = None,
    memory_mode: bool | None = None,
    **sampling_params: Any,
) -> SamplingParams:
    """Build the `SamplingParams` of a beam search.

    Args:
        beam_width: Beams searched side by side.
        n: Hypotheses to return, best first; at most `beam_width`.
        length_penalty, early_stopping, semantics: see `BeamParams`. No `semantics` is the engine's
            default, "hf" unless it was started with another.
        prune_relative, prune_absolute, prune_relative_local, max_candidates_per_parent, sample_first: see
            `BeamParams`.
        do_sample, replacement, speculation, draft_width, threshold, min_width, memory_mode: see
            `SpeculationOptions`. What is not given is the engine's default.
        **sampling_params: Further fields of vLLM's `SamplingParams`: `max_tokens`, `min_tokens`,
            `stop`, `stop_token_ids`, `ignore_eos`, `logprobs`, penalties, ...

    Raises:
        ValueError: an option is out of range, or one that beam search does not honour.
        ImportError: vLLM is not installed.
    """
    try:
        from vllm.sampling_params import SamplingParams
    except ImportError as error:
        raise ImportError("vLLM is not installed; pip install 'vllm_trie[gpu]' or 'vllm_trie[cpu]'") from error
    from vllm_trie.entrypoints.requests import check_requests

    check_requests()  # an engine without beams must refuse these params; it would sample
    options: dict[str, Any] = {
        "beam_width": beam_width,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
    }
    others = {
        "semantics": semantics,
        "prune_relative": prune_relative,
        "prune_absolute": prune_absolute,
        "prune_relative_local": prune_relative_local,
        "max_candidates_per_parent": max_candidates_per_parent,
        "sample_first": sample_first or None,
        "do_sample": do_sample,
        "replacement": replacement,
        "speculation": speculation,
        "draft_width": draft_width,
        "threshold": threshold,
        "min_width": min_width,
        "memory_mode": memory_mode,
    }
    options |= {name: value for name, value in others.items() if value is not None}
    beam = BeamParams(**options)
    _check_n(n, beam)
    extra_args = {**(sampling_params.pop("extra_args", None) or {}), **options}
    params = SamplingParams(n=n, extra_args=extra_args, **sampling_params)
    refuse_unsupported(params, beam)
    return params


def validate(params: SamplingParams, beam: BeamParams, prompt_len: int, limits: EngineLimits) -> None:
    """Check one request against its engine, before anything is scheduled.

    Args:
        params: The request's own copy, `max_tokens` and stop tokens filled in.
        beam: Its beam options.
        prompt_len: Tokens of the prompt.

    Raises:
        ValueError: naming the option, its value and what would work.
    """
    refuse_unsupported(params, beam)
    _check_n(params.n, beam)
    width = beam.beam_width
    if width > limits.max_num_seqs and not beam.memory_mode:
        raise ValueError(
            f"beam_width={width} exceeds max_num_seqs={limits.max_num_seqs}; lower it, or raise --max-num-seqs"
        )
    if limits.max_beam_width is not None and width > limits.max_beam_width:
        raise ValueError(
            f"beam_width={width} exceeds max_beam_width={limits.max_beam_width}, which this engine was started with"
        )
    if params.max_tokens is not None and beam.sample_first > params.max_tokens:
        raise ValueError(f"sample_first={beam.sample_first} exceeds max_tokens={params.max_tokens}; lower it")
    needed = num_candidates(width, len(stop_tokens(params)))
    if needed > limits.vocab_size:
        widest = limits.vocab_size // num_candidates(1, len(stop_tokens(params)))
        raise ValueError(
            f"beam_width={width} ranks {needed} candidates but the vocabulary has {limits.vocab_size} tokens; "
            f"use beam_width <= {widest}"
        )
    if beam.draft_width is not None and beam.draft_width > limits.vocab_size:
        raise ValueError(
            f"draft_width={beam.draft_width} exceeds the vocabulary of {limits.vocab_size} tokens; lower it"
        )
    if limits.num_blocks is not None:
        rows = 1 if beam.memory_mode else width
        blocks = least_blocks_to_start(0 if limits.has_window else prompt_len, rows, limits.block_size)
        if blocks > limits.num_blocks:
            raise ValueError(
                f"beam_width={width} with a prompt of {prompt_len} tokens needs at least {blocks} KV blocks, the "
                f"engine has {limits.num_blocks}; lower beam_width or give the KV cache more memory"
            )


def _check_n(n: int, beam: BeamParams) -> None:
    if n > beam.beam_width:
        raise ValueError(
            f"n={n} exceeds beam_width={beam.beam_width}; a search returns at most one hypothesis per beam"
        )
