"""The requests whose decisions are recorded, in batches: each is answered by an engine of its own.

To change or take away one here is to record anew. One may be added at the end of its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from tests.golden.model import COARSE, FINE

FIRST_TOKEN = 2  # that is none of the special ones
ITEMS = [
    (10 + number % 5, 70 + number % 29, *range(90, 90 + number % 3), 400 + number * 7 % 97) for number in range(300)
]
LISTED = [[*item] for item in ITEMS[:60]]


class Request(NamedTuple):
    """What is asked for."""

    prompt: list[int]
    options: dict[str, Any]  # of `beam_params`, or of an ordinary request
    aborted_after: int | None = None  # steps of its search


@dataclass(frozen=True)
class Batch:
    """Requests, and the engine that answers them."""

    requests: dict[str, Request]
    engine: dict[str, Any] = field(default_factory=dict)  # its options
    speculation: dict[str, Any] | None = None  # likewise, without the model
    unit: float = FINE  # of logits
    drift: float = 0.0  # of its draft model, if there is one
    catalogs: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)

    def engine_options(self, folder: Path, draft: Path) -> dict[str, Any]:
        """All options of the engine, whose catalogs and draft model are there."""
        catalogs = {name: str(folder / f"{name}.catalog") for name in self.catalogs}
        options = {"max_num_seqs": 128, "max_num_batched_tokens": 512} | self.engine
        options["additional_config"] = {"trie_beam": {"catalogs": catalogs}}
        if self.speculation is not None:
            is_model = self.speculation["method"] == "draft_model"
            options["speculative_config"] = self.speculation | ({"model": str(draft)} if is_model else {})
        return options


def prompt_of(length: int, seed: int) -> list[int]:
    """Tokens that no library draws; those of seeds that differ by 100 begin with 40 that are the same."""
    return [
        FIRST_TOKEN + (place * place * 31 + place * 1009 + (seed % 100 if place < 40 else seed) * 7919) % 2000
        for place in range(length)
    ]


def _named(options: list[dict[str, Any]], repeats: int, **common: Any) -> dict[str, Request]:
    """A request of each, for prompts of several lengths and widths that go round."""
    requests = {}
    for number, (own, again) in enumerate(product(options, range(repeats))):
        width = WIDTHS[(number + again) % len(WIDTHS)]
        given = {"beam_width": width} if not own.keys() & {"beam_width", "beam_widths"} else {}
        given = {"max_tokens": 20 + number % 17, **common, **given, **own}
        if "compact" not in own:
            given.setdefault("n", given.get("beam_width") or max(given["beam_widths"]))
        name = f"{'+'.join(own) or 'plain'} {number}"
        requests[name] = Request(prompt_of(LENGTHS[number % len(LENGTHS)], number), given)
    return requests


WIDTHS = (4, 2, 5, 3, 8, 1, 6)
LENGTHS = (1, 20, 31, 32, 33, 64, 90, 47)

RANKING: list[dict[str, Any]] = [
    {"semantics": semantics, "length_penalty": penalty, **more}
    for semantics, penalty, more in product(
        ("hf", "vllm", "tridecode"), (0.0, 0.6, 1.0, 2.0, -1.0), ({}, {"ignore_eos": True}, {"min_tokens": 9})
    )
]
RANKING += [
    {"early_stopping": early, "length_penalty": penalty, **more}
    for early, penalty, more in product((True, "never"), (0.5, 1.0, 2.0, -1.0), ({}, {"stop_token_ids": [13, 15, 300]}))
]
RANKING += [
    {"beam_widths": [2, 5, 3]},
    {"beam_widths": [5, 1, 4, 2], "ignore_eos": True, "logprobs": 1},
    {"beam_widths": [1, 2, 4, 8, 16, 16, 8, 4]},
    {"beam_widths": [8, 2], "early_stopping": True, "no_repeat_ngram_size": 2},
    {"num_beam_groups": 2, "diversity_penalty": 0.4, "beam_width": 4, "logprobs": 1},
    {"num_beam_groups": 2, "diversity_penalty": 1.0, "beam_width": 8, "stop": ["self", "("], "min_p": 0.01},
    {"num_beam_groups": 3, "diversity_penalty": 2.5, "beam_width": 6, "ignore_eos": True},
    {"num_beam_groups": 5, "diversity_penalty": 0.5, "beam_width": 5, "length_penalty": 0.0},
    {"num_beam_groups": 2, "diversity_penalty": 0.7, "beam_width": 4, "allowed_sequences": LISTED},
    {"prune_relative": 0.05, "max_candidates_per_parent": 2, "length_penalty": 0.3},
    {"prune_absolute": 1.5, "prune_relative_local": 0.3, "ignore_eos": True},
    {"prune_absolute": 0.1, "beam_width": 8},
    {"max_candidates_per_parent": 1, "ignore_eos": True},
    {"sample_first": 9, "seed": 5, "temperature": 0.9, "logprobs": 2},
    {"sample_first": 3, "seed": 6, "top_k": 10},
    {"max_tokens": 1, "logprobs": 2},
    {"max_tokens": 2, "ignore_eos": True},
    {"max_tokens": 3, "ignore_eos": True, "stop_token_ids": [13]},
    {"n": 1, "beam_width": 7},
    {"beam_width": 32, "n": 5},
    {"beam_width": 64, "n": 64, "max_tokens": 12},
    {"beam_width": 100, "n": 3, "max_tokens": 5},
]

CONTROLS: list[dict[str, Any]] = [
    {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "logprobs": 3},
    {"presence_penalty": -0.4, "frequency_penalty": -0.3, "repetition_penalty": 0.9, "min_tokens": 5},
    {"frequency_penalty": 1.5, "ignore_eos": True, "semantics": "vllm"},
    {"bad_words": ["self", " return", " by"], "stop": ["\n\n", "):"], "min_tokens": 6},
    {"stop": ["self.", "f(x", "t(s", "e("], "include_stop_str_in_output": True, "early_stopping": True},
    {"stop": list(" estia_(.rn"), "logprobs": 1},
    {"stop": ["e"], "semantics": "vllm"},
    {"stop": ["a", "in"], "semantics": "tridecode"},
    {"stop_token_ids": [*range(5, 400, 9)], "logprobs": 0},
    {"stop_token_ids": [*range(3, 2000, 3)], "length_penalty": 0.0},
    {"allowed_token_ids": [*range(1, 300)], "stop_token_ids": [13, 15], "early_stopping": "never"},
    {"allowed_token_ids": [1, 7, 8, 9], "logprobs": 0},
    {"allowed_token_ids": [9], "ignore_eos": True},
    {"temperature": 1.7, "top_k": 12, "top_p": 0.8},
    {"temperature": 0.6, "logprobs": 2},
    {"temperature": 2.0, "top_p": 0.5, "min_tokens": 7},
    {"min_p": 0.05, "logit_bias": {7: 12.0, 30: 14.0}},
    {"min_p": 0.2, "logprobs": 1, "frequency_penalty": 0.5, "ignore_eos": True},
    {"top_k": 1},
    {"logit_bias": {1: -100.0, 40: 18.0}, "max_tokens": 12},
    {"no_repeat_ngram_size": 1, "logprobs": 2},
    {"no_repeat_ngram_size": 2, "frequency_penalty": 0.4, "ignore_eos": True, "logit_bias": {40: 15.0, 41: 15.0}},
    {"no_repeat_ngram_size": 3, "semantics": "vllm", "logprobs": 1, "logit_bias": {40: 15.0, 41: 15.0}},
    {"phrase_boosts": [([7, 8], 3.0), ([[30], [13, 9]], 1.5), ([8], -2.0)], "logprobs": 2},
    {"phrase_boosts": [([token, token + 1], 6.0) for token in range(20, 800, 3)], "length_penalty": 0.5},
    {"phrase_boosts": [(" return", 9.0), ("self.", 8.0), ("()", -3.0)], "stop": ["\n"]},
    {"phrase_boosts": [([7], 1.0), ([15, 7, 7], -4.0)], "semantics": "vllm", "ignore_eos": True},
    {"structured_outputs": StructuredOutputsParams(regex="[a-z]{2,6}(_[a-z]{2,4})?")},
    {"structured_outputs": StructuredOutputsParams(choice=["self", "self.value", "return", "return None"])},
    {"structured_outputs": StructuredOutputsParams(grammar='root ::= "(" inside ")"\ninside ::= [a-z]+ | root')},
    {"structured_outputs": StructuredOutputsParams(regex="[0-9]{9,20}"), "no_repeat_ngram_size": 2, "logprobs": 1},
    {"structured_outputs": StructuredOutputsParams(json_object=True), "semantics": "vllm", "max_tokens": 30},
]

ALONG_ITEMS: list[dict[str, Any]] = [
    {"catalog": "items", "logprobs": 2},
    {"catalog": "items", "beam_width": 50, "n": 50},
    {"catalog": "items", "catalog_stop": True, "temperature": 0.8},
    {"catalog": "items", "catalog_items": 3, "catalog_renormalize": True, "length_penalty": 0.0},
    {"catalog": "items", "catalog_items": 2, "early_stopping": True, "no_repeat_ngram_size": 2},
    {"catalog": "items", "catalog_after": 13, "early_stopping": True, "logit_bias": {13: 16.0}},
    {"catalog": "items", "phrase_boosts": [([10, 70], 3.0), ([412], 5.0)]},
    {"catalog": "nested", "catalog_stop": True, "beam_width": 8},
    {"catalog": "nested", "beam_width": 8, "length_penalty": 2.0},
    {"catalog": "nested", "catalog_renormalize": True, "compact": True, "n": 1},
    {"allowed_sequences": LISTED, "compact": True, "n": 1},
    {"allowed_sequences": LISTED[:2], "catalog_stop": True, "min_tokens": 3, "frequency_penalty": 0.5},
    {"allowed_sequences": ["self", "self.value", "return"], "catalog_stop": True},
]

DELIVERY: list[dict[str, Any]] = [
    {"trace": True},
    {"trace": True, "semantics": "vllm", "beam_width": 3},
    {"trace": True, "stop": ["e"], "compact": True, "n": 1},
    {"compact": True, "n": 1, "length_penalty": 0.3},
    {"compact": True, "n": 1, "semantics": "tridecode"},
    {"beam_results": True, "stop_token_ids": [13, 15, 300]},
    {"output_kind": RequestOutputKind.DELTA, "n": 1, "max_tokens": 40},
    {"output_kind": RequestOutputKind.DELTA, "n": 1, "stop": ["e", "in"], "logprobs": 1, "max_tokens": 40},
    {"output_kind": RequestOutputKind.DELTA, "max_tokens": 40},
    {"output_kind": RequestOutputKind.CUMULATIVE, "n": 1, "ignore_eos": True},
    {"detokenize": False},
    {"skip_special_tokens": False, "stop": ["x"]},
]

SAMPLED: list[dict[str, Any]] = [
    {"do_sample": True, "seed": 3, "temperature": 0.7},
    {"do_sample": True, "seed": 4, "temperature": 0.7, "replacement": True},
    {"do_sample": True, "seed": 5, "temperature": 0.9, "stochastic": True, "logprobs": 1},
    {"do_sample": True, "seed": 6, "top_k": 20, "top_p": 0.9, "ignore_eos": True},
    {"do_sample": True, "seed": 7, "temperature": 1.5, "min_tokens": 8, "logprobs": 2},
    {"do_sample": True, "seed": 8, "stochastic": True, "ignore_eos": True},
    {"do_sample": True, "seed": 9, "stop": ["e"], "replacement": True, "length_penalty": 0.0},
    {"do_sample": True, "seed": 10, "structured_outputs": StructuredOutputsParams(regex="[a-z]{2,6}(_[a-z]{2,4})?")},
]

ORDINARY: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 40, "logprobs": 2},
    {"temperature": 0, "max_tokens": 30, "ignore_eos": True, "stop": ["e("]},
    {"temperature": 0, "max_tokens": 50, "frequency_penalty": 0.5},
]


def _ordinary(first: int) -> dict[str, Request]:
    return {
        f"ordinary {first + number}": Request(prompt_of(30 + 9 * number, first + number), options)
        for number, options in enumerate(ORDINARY)
    }


def _mixed(*parts: dict[str, Request]) -> dict[str, Request]:
    """One of each part in turn, as long as there are any."""
    queues = [[*part.items()] for part in parts]
    most = max(map(len, queues))
    return dict(queue[place] for place in range(most) for queue in queues if place < len(queue))


def _aborted(count: int) -> dict[str, Request]:
    """Searches whose clients vanish."""
    return {
        f"aborted {number}": Request(
            prompt_of(25 + number, 40 + number),
            {"beam_width": 2 + number, "n": 1 + number, "ignore_eos": True, "max_tokens": 90},
            aborted_after=3 + 7 * number,
        )
        for number in range(count)
    }


def _score(candidates: Sequence[Any]) -> list[float]:
    """Of steps, which depends on their texts alone."""
    return [sum(ord(letter) * (place % 7 - 3) for place, letter in enumerate(one.text)) / 1000 for one in candidates]


STEPS: list[dict[str, Any]] = [
    {"seed": 7, "candidates": 3},
    {"seed": 8, "order": "best", "pool": 2, "candidates": 2},
    {"seed": 9, "allot": "rebase", "prefer_shared": 0.1, "lookahead": 2},
    {"seed": 10, "allot": "dvts", "beam_width": 3},
    {"seed": 11, "order": "mcts"},
]
OF_STEPS = {"unit": "step", "step_stop": ["e"], "scorer": _score, "max_steps": 3, "beam_width": 2, "n": 2}
LONG_STEPS = [OF_STEPS | {"max_tokens": 30} | options for options in STEPS]

DRAFTED: list[dict[str, Any]] = [
    *({"speculation": "exact", "draft_width": width, "beam_width": 4} for width in (4, 8, 16)),
    *({"speculation": "exact", "draft_width": 12, **options} for options in RANKING[:45:4]),
    *({"speculation": "exact", **options} for options in CONTROLS[::2] if "logit_bias" not in options),
    {"speculation": "exact", "beam_width": 1, "ignore_eos": True},
    {"speculation": "exact", "beam_width": 16, "draft_width": 32, "n": 3},
    {"speculation": "exact", "trace": True},
    {"speculation": "exact", "compact": True, "n": 1},
    {"speculation": "exact", "allowed_sequences": LISTED, "catalog_stop": True},
    {"speculation": "auto"},
    {"speculation": "auto", "early_stopping": "never", "length_penalty": 2.0},
    {"speculation": "auto", "stop": ["e"], "logprobs": 1},
    {"speculation": "off"},
]
SAMPLED_DRAFTS: list[dict[str, Any]] = [
    {"speculation": "sample", "seed": 3, "draft_width": 8, "beam_width": 4},
    {"speculation": "sample", "seed": 4, "replacement": True, "temperature": 0.8},
    {"speculation": "sample", "seed": 5, "memory_mode": True, "beam_width": 4},
    {"speculation": "sample", "seed": 6, "threshold": 0.7, "min_width": 2, "beam_width": 4},
    {"speculation": "sample", "seed": 7, "threshold": 0.9, "ignore_eos": True, "replacement": True},
    {"speculation": "sample", "seed": 8, "accept": "top_k", "accept_top_k": 6},
    {"speculation": "sample", "seed": 9, "top_k": 20, "top_p": 0.9, "logprobs": 1},
    {"speculation": "sample", "seed": 10, "stop": ["e"], "min_tokens": 3},
]
CONTRASTED: list[dict[str, Any]] = [
    {"contrast": {"model": "draft", "alpha": 0.1, "beta": 0.5}},
    {"contrast": {"model": "draft", "alpha": 0.01, "beta": 2.0}, "length_penalty": 0.0},
    {"contrast": {"model": "draft", "alpha": 0.05, "beta": 0.7}, "logprobs": 1, "stop": ["e"]},
]
BY_LOOKUP: list[dict[str, Any]] = [
    *({"speculation": "exact", **options} for options in RANKING[1:45:6]),
    *({"speculation": "exact", **options} for options in CONTROLS[1::4]),
    *({"speculation": "auto", **options} for options in RANKING[45:60:3]),
    *({"speculation": "exact", "logit_bias": {40: bias, 41: bias}} for bias in (14.0, 17.0, 20.0)),
    {"speculation": "exact", "allowed_sequences": LISTED},
]
TO_THE_END: list[dict[str, Any]] = [
    {"ignore_eos": True, "semantics": semantics, "beam_width": width, "n": 1, "max_tokens": 80 + 40 * (width < 4)}
    for semantics, width in product(("hf", "vllm", "tridecode"), (1, 2, 3, 4))
]

FORESTS = {"num_speculative_tokens": 3}
BATCHES: dict[str, Batch] = {
    "ranking": Batch(_mixed(_named(RANKING, 4), _aborted(4), _ordinary(0))),
    "ties": Batch(_mixed(_named(RANKING[::2], 3), _named(CONTROLS[::4], 2), _named(SAMPLED[:3], 1)), unit=COARSE),
    "controls": Batch(
        _mixed(
            _named(CONTROLS, 4),
            _named(SAMPLED, 4),
            _named(DELIVERY, 3),
            _named(ALONG_ITEMS, 3),
            _named(LONG_STEPS, 2),
            _ordinary(10),
        ),
        catalogs={"items": ITEMS, "nested": sorted({*ITEMS, *(item[:2] for item in ITEMS[::7])})},
    ),
    "preempted": Batch(
        _mixed(_named(RANKING[:-3:3], 3, max_tokens=70), _named(CONTROLS[::3], 2), _named(SAMPLED, 1), _ordinary(20)),
        engine={"num_gpu_blocks_override": 60, "async_scheduling": False},
    ),
    "drafts": Batch(
        _mixed(_named(DRAFTED, 2), _named(SAMPLED_DRAFTS, 5), _named(CONTRASTED, 4), _aborted(2), _ordinary(30)),
        speculation={"method": "draft_model", **FORESTS},
        drift=0.15,
    ),
    "ngrams": Batch(
        _mixed(_named(BY_LOOKUP, 3), _ordinary(40)),
        speculation={"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, **FORESTS},
    ),
    "long": Batch(_named(TO_THE_END, 63)),
}
