"""Which options can be combined: from these tables come refusals, docs/options.md and the test of all pairs.

A key is written as users write it: `compact` stands for any value, `semantics="vllm"` for this value only. Keys also
name the fields of vLLM's `SamplingParams` that clash with options. Relations between numbers are checked in
`request.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

from vllm_trie.options.parts import Catalogs, Delivery, Ranking, RequestSampling, RequestSpeculating, Reranking, Steps
from vllm_trie.options.shown import shown_option


class Clash(NamedTuple):
    """None of `these` can be combined with any of `others`; the refusal names both, the reason and the cure."""

    these: tuple[str, ...]
    others: tuple[str, ...]
    because: str
    cure: str = "leave one of them out"


class Need(NamedTuple):
    """Each of `these` needs at least one of `needs`."""

    these: tuple[str, ...]
    needs: tuple[str, ...]
    why: str  # follows the option in the refusal
    without: tuple[str, ...] = ()  # only refused with one of these, if there are any


ASKS_NOTHING = {
    "temperature": 0.0,
    "top_k": -1,
    "speculation": "off",
    "accept": "exact",
    "rerank_scale": 0.0,
}  # for options that are not listed: False, the default

REBASE, DVTS, BEST, MCTS = 'allot="rebase"', 'allot="dvts"', 'order="best"', 'order="mcts"'
STEP, VLLM, EXACT, SAMPLE = 'unit="step"', 'semantics="vllm"', 'speculation="exact"', 'speculation="sample"'
SAMPLED, NOT_SAMPLED = ("do_sample", SAMPLE), ("do_sample=False", EXACT)
OTHER_RULES = (VLLM, 'semantics="tridecode"')
ITEMS = ("catalog", "allowed_sequences")
# Only semantics="hf" has these: asking for one selects it.
OF_HF = ("beam_widths", "num_beam_groups", "contrast", *ITEMS)
PRUNING = ("prune_relative", "prune_absolute", "prune_relative_local", "max_candidates_per_parent")
OF_PLAIN_STEPS = ("beam_widths", "num_beam_groups", "stochastic", "structured_outputs", "contrast")  # not of forests
BY_RANK = 'accept="top_k"'
OF_SAMPLED_DRAFTS = ("memory_mode", "min_width", "threshold", BY_RANK)
OF_TOKENS = Ranking, Delivery, Reranking, RequestSampling, Catalogs, RequestSpeculating
NOT_OF_STEPS = tuple(chain.from_iterable(part.model_fields for part in OF_TOKENS))
OF_SHARES = ("allot_temperature", "prefer_shared")
OF_ALL_STEPS = tuple(name for name in Steps.model_fields if name not in (*OF_SHARES, "pool", "exploration"))
NOT_HONOURED = (
    *("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids"),
    *("thinking_token_budget", "repetition_detection", "trace_decode_token_ids"),
)
OF_AN_OUTPUT = ("presence_penalty", "frequency_penalty", "bad_words", "min_tokens", "structured_outputs")
USE_HF = 'leave it out, or use semantics="hf"'

CLASHES = (
    Clash(NOT_OF_STEPS, (STEP,), "which samples steps", "leave it out"),
    Clash((DVTS,), (BEST, MCTS), "which expands the best of all subtrees"),
    Clash((REBASE,), (MCTS,), "whose own rule decides how many steps each candidate gets"),
    Clash(('early_stopping="never"',), (STEP,), "where no score is a bound", "use False or True"),
    Clash((*OF_AN_OUTPUT, *NOT_HONOURED), (STEP,), "where it would see only one step", "leave it out"),
    Clash(("detokenize=False",), (STEP,), "which looks for delimiters", "leave it out"),
    Clash(('output_kind="DELTA"',), (STEP,), "whose hypotheses are known only at the end", "do not stream"),
    Clash(NOT_HONOURED, ("beam_width",), "whose searches do not honour it", "leave it out"),
    Clash(("logprobs=-1",), (STEP, "beam_width"), "which reports only the best tokens", "ask for a number of them"),
    Clash(("early_stopping",), (VLLM,), "which ends at max_tokens", USE_HF),
    Clash(("early_stopping",), OTHER_RULES[1:], "which ends a step after beam_width hypotheses are finished", USE_HF),
    Clash((*PRUNING, "sample_first"), (VLLM,), "which reproduces vLLM's own search", USE_HF),
    Clash(("temperature", "top_p", "top_k", "min_p"), (VLLM,), "whose beams ignore it", USE_HF),
    Clash(("do_sample",), (EXACT,), "which takes the best", f"use {SAMPLE}"),
    Clash(("do_sample=False",), (SAMPLE,), "which samples beams", f"use {EXACT}"),
    Clash(SAMPLED, OTHER_RULES, "which does not sample beams", USE_HF),
    Clash((*PRUNING, "sample_first"), SAMPLED, "which samples from all continuations in each step"),
    Clash(("temperature=0.0",), ("sample_first", *SAMPLED, STEP), "which samples", "raise it"),
    Clash(OF_HF, OTHER_RULES, "whose rules do not include it", USE_HF),
    Clash(OF_HF, SAMPLED, "which samples instead of taking the best"),
    Clash(OF_HF, ("sample_first",), "which begins with sampled tokens"),
    Clash(("phrase_boosts",), ("sample_first", *SAMPLED), "which samples by the model's probabilities"),
    Clash(("phrase_boosts",), ("num_beam_groups",), "whose penalties stay in the scores of hypotheses"),
    Clash(("phrase_boosts",), ("catalog_renormalize",), "which replaces the model's log-probabilities"),
    Clash(("contrast",), (EXACT,), "where the draft model drafts", 'use "off" or "auto"'),
    Clash(("contrast",), ("num_beam_groups",), "whose penalties stay in the scores of hypotheses"),
    Clash(("contrast",), ITEMS, "whose items may all be implausible"),
    Clash(("contrast",), ("structured_outputs",), "whose masks are not applied to the draft model"),
    Clash(("num_beam_groups",), ("beam_widths",), "which would change how wide groups are"),
    Clash(("allowed_sequences",), ("catalog",), "which already names the items"),
    Clash(("stop",), ITEMS, "whose items end hypotheses"),
    Clash(("structured_outputs",), ITEMS, "whose items already determine the hypotheses"),
    Clash(("logprobs",), ("catalog_renormalize",), "which replaces the model's log-probabilities"),
    Clash(("ignore_eos",), ("structured_outputs",), "which leaves nothing else to end a hypothesis", "leave it out"),
    Clash(("n", "logprobs", "beam_results"), ("compact",), "which returns one output", "leave it out"),
    Clash(("compact", "trace"), ("rerank",), "which returns hypotheses in another order"),
    Clash(ITEMS, ("rerank",), "which compares texts, not items"),
    Clash(("detokenize=False",), ("rerank",), "which compares texts", "leave it out"),
    Clash(('output_kind="DELTA"',), ("rerank",), "whose order is known only at the end", "do not stream"),
    Clash(("rerank_confidence",), ("rerank_scale",), "whose weights its resampling does not support"),
    Clash(("replacement",), ("stochastic",), "which samples without replacement"),
    Clash(("length_penalty", "early_stopping"), ("stochastic",), "which returns hypotheses in sampling order"),
    Clash((BY_RANK,), ("min_width", "threshold"), "which decides widths by what the exact rule accepts"),
    Clash(OF_SAMPLED_DRAFTS, OF_PLAIN_STEPS, "whose steps take no drafts"),
)

NEEDS = (
    Need((BEST, MCTS), ("max_steps",), "may go on forever, since there is always an open candidate; set max_steps"),
    Need(OF_ALL_STEPS, (STEP,), f"needs {STEP}; add it, or leave it out"),
    Need(OF_SHARES, (REBASE,), f"acts on shares by score; add {REBASE}, or leave it out"),
    Need(("pool",), (BEST, MCTS), f"has no effect without {BEST} or {MCTS}; add one, or leave it out"),
    Need(("exploration",), (MCTS,), f"has no effect without {MCTS}; add it, or leave it out"),
    Need(
        ("catalog_items", "catalog_after", "catalog_stop", "catalog_renormalize", "catalog_unique"),
        ITEMS,
        "needs a catalog or allowed_sequences; add one, or leave it out",
    ),
    Need(("exclude_items", "exclude_list"), ("catalog",), "needs a catalog of items; add one, or leave it out"),
    Need(("num_beam_groups",), ("diversity_penalty",), "needs a diversity_penalty above 0, or all groups are equal"),
    Need(("diversity_penalty",), ("num_beam_groups",), "needs more than one group of beams; set num_beam_groups"),
    Need(("replacement", "stochastic"), ("do_sample",), "acts only on sampling; set do_sample=True", NOT_SAMPLED),
    Need(
        ("draft_width", *OF_SAMPLED_DRAFTS),
        ("speculation",),
        "has no effect, as this search does not speculate; leave it out",
        ('speculation="off"',),
    ),
    Need(OF_SAMPLED_DRAFTS, (SAMPLE,), f"has no effect unless beams are sampled; set {SAMPLE}", NOT_SAMPLED),
    Need(("metric", "rerank_scale", "rerank_confidence"), ("rerank",), 'acts only with rerank; add rerank="mbr"'),
    Need(("accept_top_k",), (BY_RANK,), f"has no effect without {BY_RANK}; add that, or leave it out"),
    Need(
        ("seed",),
        ("sample_first", *SAMPLED, STEP),
        "has no effect in a search that does not sample; leave it out, or set do_sample or sample_first",
        NOT_SAMPLED,
    ),
)


def parsed_option_key(key: str) -> tuple[str, Any]:
    """The option of a key of the tables, and its value; None stands for any value."""
    name, _, value = key.partition("=")
    return name, ast.literal_eval(value) if value else None


_KEYS: dict[str, dict[str, Any]] = {}  # option -> its keys in the tables, and their values
for _row in (*CLASHES, *NEEDS):
    for _key in chain.from_iterable(words for words in _row if isinstance(words, tuple)):
        _name, _value = parsed_option_key(_key)
        _KEYS.setdefault(_name, {})[_key] = _value
FIELDS = _KEYS.keys()  # options, and fields of `SamplingParams`

_DERIVED = {  # what clients of a server write for these fields of vLLM
    'output_kind="DELTA"': "stream=True",
    "structured_outputs": "also response_format, or tools",
}

_PAIRS = [(this, other, row) for row in CLASHES for this in row.these for other in row.others]
_PLACES: dict[str, dict[str, int]] = {}  # positions in `_PAIRS`, by both keys: the first clash of several is reported
for _place, (_this, _other, _) in enumerate(_PAIRS):
    _PLACES.setdefault(_this, {})[_other] = _place


def refuse_options(options: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse options that cannot be combined, or that need others.

    Args:
        options: Those that differ from their defaults.
        prefix: Of the options' names in the refusal.

    Raises:
        ValueError: names the options, their values and what would work.
    """
    if why := options_refusal(options, prefix):
        raise ValueError(why)


def options_refusal(options: Mapping[str, Any], prefix: str = "") -> str | None:
    """The refusal of these options in one sentence, as they clash or need others; None if they are accepted."""
    keys = _option_keys(options)
    return _option_keys_clash(keys, prefix) or _option_keys_lack(keys, prefix)


def options_clash(options: Mapping[str, Any]) -> str | None:
    """The refusal of options that clash, in one sentence; None if none do."""
    return _option_keys_clash(_option_keys(options), "")


def _option_keys_clash(keys: Mapping[str, Any], prefix: str) -> str | None:
    places = [at for this in keys for other, at in _PLACES.get(this, {}).items() if other in keys]
    if not places:
        return None
    this, other, row = _PAIRS[min(places)]
    this, other = (prefix + _shown_option_key(key, keys[key]) for key in (this, other))
    return f"{this} is not supported together with {other}, {row.because}; {row.cure}"


def _option_keys_lack(keys: Mapping[str, Any], prefix: str) -> str | None:
    for these, needs, why, without in NEEDS:
        if keys.keys().isdisjoint(needs) and not (without and keys.keys().isdisjoint(without)):
            for this in filter(keys.__contains__, these):
                return f"{prefix}{_shown_option_key(this, keys[this])} {why}"
    return None


def _option_keys(options: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the tables that these options match, and the values given."""
    return {
        key: value
        for name, value in options.items()
        if value is not None and name in _KEYS
        for key, exact in _KEYS[name].items()
        if (value == exact if exact is not None else value is not False and not _option_asks_nothing(name, value))
    }


def _option_asks_nothing(name: str, value: Any) -> bool:
    return name in ASKS_NOTHING and bool(value == ASKS_NOTHING[name])


def _shown_option_key(key: str, value: Any) -> str:
    """A key as the user wrote it, objects by name only; `beam_width` as the user's name for the search."""
    if key == "beam_width":
        return str(value)
    if key in _DERIVED:
        return f"{key} (over HTTP {_DERIVED[key]})"
    return key if "=" in key or not isinstance(value, int | float | str | list) else f"{key}={shown_option(value)}"
