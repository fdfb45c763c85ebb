"""Every option: by itself, together with others, with what the engine says, and by the names of other systems."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from vllm import SamplingParams

from tests.conftest import ROOT
from tools.options_tables import PAGE, markdown_names, markdown_table, with_tables
from vllm_trie import BeamParams, beam_params
from vllm_trie.entrypoints.limits import EngineLimits, validate
from vllm_trie.options import OTHER_NAMES, SpeculationOptions, TrieBeamConfig, choices, resolve
from vllm_trie.sampling_params import is_controlled, logits_filters, stop_tokens
from vllm_trie.search.filters import LogitsFilters

# Requests.

LIMITS = EngineLimits(max_num_seqs=64, vocab_size=300, block_size=32, num_blocks=1000)


def check(limits: EngineLimits = LIMITS, prompt_len: int = 10, **options: object) -> None:
    params = beam_params(**options)
    beam = BeamParams.from_extra_args(params.extra_args)
    assert beam is not None
    validate(params, beam, prompt_len, limits)


@pytest.mark.parametrize("width", [0, -1, 2.5, "8", "many", True, None])
def test_beam_width_must_be_a_positive_integer(width: object) -> None:
    with pytest.raises(ValueError, match=f"beam_width={width!r}"):
        beam_params(width)


@pytest.mark.parametrize("penalty", [math.nan, math.inf, -math.inf, 1e5, -500, 10**400, "1", None, True])
def test_length_penalty_must_be_a_number_that_float32_can_raise_lengths_to(penalty: object) -> None:
    with pytest.raises(ValueError, match="length_penalty="):
        beam_params(2, length_penalty=penalty)


@pytest.mark.parametrize("early_stopping", ["always", "False", 2, 1.0, None])
def test_early_stopping_must_be_one_of_three(early_stopping: object) -> None:
    with pytest.raises(ValueError, match="early_stopping="):
        beam_params(2, early_stopping=early_stopping)


def test_unknown_semantics_are_refused() -> None:
    with pytest.raises(ValueError, match="semantics='tree' is unknown; known: 'hf', 'vllm', 'tridecode'"):
        beam_params(2, semantics="tree")


def test_a_request_that_names_no_semantics_gets_the_engines() -> None:
    engine = TrieBeamConfig(semantics="vllm")
    for own, found in ((None, "vllm"), ("hf", "hf")):
        assert resolve(BeamParams(beam_width=2, semantics=own), engine, has_drafts=False).semantics == found


@pytest.mark.parametrize("semantics", ["vllm", "tridecode"])
@pytest.mark.parametrize("early_stopping", [True, "never"])
def test_early_stopping_is_refused_where_it_means_nothing(early_stopping: object, semantics: str) -> None:
    with pytest.raises(ValueError, match=f'early_stopping=.* means nothing under semantics="{semantics}"'):
        beam_params(2, semantics=semantics, early_stopping=early_stopping)


def test_n_above_the_width_is_refused() -> None:
    with pytest.raises(ValueError, match="n=4 exceeds beam_width=3"):
        beam_params(3, n=4)


@pytest.mark.parametrize(
    "typo", ["beam_widht", "beamwidth", "num_beams", "early_stop", "length_penalti", "early_stoping", "semantic"]
)
def test_a_near_miss_is_refused_without_a_width_too(typo: str) -> None:
    with pytest.raises(ValueError, match=f"unknown option {typo}=.*did you mean (beam_width|length|early|sem)"):
        BeamParams.from_extra_args({typo: 8})


def test_options_of_others_pass() -> None:
    assert BeamParams.from_extra_args({"kv_transfer_params": {}, "ec_transfer_params": 1, "width": 8}) is None
    assert BeamParams.from_extra_args({"kv_transfer_params": {}, "beam_width": 2}) == BeamParams(beam_width=2)
    assert BeamParams.from_extra_args(None) is None


def test_options_without_a_width_are_refused() -> None:
    with pytest.raises(ValueError, match="length_penalty given without beam_width"):
        BeamParams.from_extra_args({"length_penalty": 1.0})


def test_booleans_that_became_numbers_on_the_way_are_booleans_again() -> None:
    assert BeamParams.from_extra_args({"beam_width": 2, "early_stopping": 1}) == BeamParams(
        beam_width=2, early_stopping=True
    )
    parsed = BeamParams.from_extra_args({"beam_width": 2, "early_stopping": 0})
    assert parsed is not None
    assert parsed.early_stopping is False


def test_width_above_the_engines_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="beam_width=65 exceeds max_num_seqs=64; lower it, or raise --max-num-seqs"):
        check(beam_width=65)
    check(beam_width=64)


def test_width_above_the_engines_own_limit_is_refused() -> None:
    limits = replace(LIMITS, max_beam_width=16)
    with pytest.raises(ValueError, match="beam_width=17 exceeds max_beam_width=16, which this engine was started with"):
        check(limits, beam_width=17)
    check(limits, beam_width=16)


def test_width_that_the_vocabulary_cannot_fill_is_refused() -> None:
    wide = EngineLimits(max_num_seqs=1000, vocab_size=300, block_size=32, num_blocks=10_000)
    with pytest.raises(ValueError, match="use beam_width <= 150"):
        check(wide, beam_width=151)
    check(wide, beam_width=150)
    with pytest.raises(ValueError, match="use beam_width <= 75"):
        check(wide, beam_width=100, stop_token_ids=[3, 4, 5])


def test_width_that_the_pool_cannot_hold_is_refused() -> None:
    small = EngineLimits(max_num_seqs=64, vocab_size=300, block_size=32, num_blocks=12)
    with pytest.raises(ValueError, match="beam_width=8 with a prompt of 200 tokens needs at least 14 KV blocks"):
        check(small, prompt_len=200, beam_width=8)
    check(small, prompt_len=200, beam_width=6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_logprobs", 0),
        ("logprob_token_ids", [1]),
        ("thinking_token_budget", 3),
        ("trace_decode_token_ids", [1]),
        ("prompt_logprob_token_ids", [[1]]),
    ],
)
def test_fields_that_beam_search_does_not_honour_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field}=.* is not supported together with beam_width"):
        beam_params(2, **{field: value})


@pytest.mark.parametrize(("field", "value"), [("temperature", 0.7), ("top_p", 0.9), ("top_k", 40), ("min_p", 0.1)])
def test_fields_that_vllms_beams_ignore_are_refused_under_its_semantics(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f'{field}={value} is not supported under semantics="vllm"'):
        beam_params(2, semantics="vllm", **{field: value})
    assert logits_filters(beam_params(2, **{field: value})) == LogitsFilters(**{field: value})


def test_no_temperature_and_no_limit_are_no_filters() -> None:
    assert logits_filters(SamplingParams(temperature=0.0, top_k=-1)) == LogitsFilters()


def test_logprobs_of_the_whole_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="logprobs=-1 is not supported together with beam_width"):
        beam_params(2, logprobs=-1)


@pytest.mark.parametrize(
    ("fields", "controlled"),
    [
        ({}, False),
        ({"stop": ["x"], "logprobs": 3, "min_tokens": 2}, False),
        ({"logit_bias": {}, "bad_words": [], "allowed_token_ids": None}, False),
        ({"presence_penalty": -0.5}, True),
        ({"frequency_penalty": 0.5}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"logit_bias": {1: 2.0}}, True),
        ({"allowed_token_ids": [1]}, True),
        ({"bad_words": ["x"]}, True),
    ],
)
def test_only_what_acts_on_the_logits_costs_their_processing(fields: dict, controlled: bool) -> None:
    assert is_controlled(beam_params(2, **fields)) is controlled


def test_helper_builds_what_a_user_would_write_by_hand() -> None:
    params = beam_params(8, n=3, length_penalty=0.5, early_stopping="never", max_tokens=7, extra_args={"mine": 1})
    assert isinstance(params, SamplingParams)
    assert (params.n, params.max_tokens, params.temperature) == (3, 7, 1.0)
    assert params.extra_args == {
        "mine": 1,
        "beam_width": 8,
        "length_penalty": 0.5,
        "early_stopping": "never",
    }
    assert beam_params(2, semantics="vllm").extra_args["semantics"] == "vllm"


def test_helper_takes_no_extra_args_for_none() -> None:
    assert beam_params(2, extra_args=None).extra_args["beam_width"] == 2


def test_stop_tokens_are_eos_and_stop_token_ids() -> None:
    params = SamplingParams(stop_token_ids=[9, 4])
    params.update_from_generation_config({}, eos_token_id=2)
    assert stop_tokens(params) == (2, 4, 9)
    params = SamplingParams(stop_token_ids=[9, 4], ignore_eos=True)
    params.update_from_generation_config({}, eos_token_id=2)
    assert stop_tokens(params) == (4, 9)


@pytest.mark.parametrize("ratio", [0, -0.1, 1.5, math.nan, "0.5", True])
@pytest.mark.parametrize("option", ["prune_relative", "prune_relative_local"])
def test_a_relative_bound_must_be_a_ratio(option: str, ratio: object) -> None:
    with pytest.raises(ValueError, match=f"{option}={ratio!r} is not a ratio of probabilities"):
        beam_params(2, **{option: ratio})


@pytest.mark.parametrize("trail", [-1, math.nan, "1", True])
def test_an_absolute_bound_must_be_a_difference(trail: object) -> None:
    with pytest.raises(ValueError, match=f"prune_absolute={trail!r} is not a difference of log-probabilities"):
        beam_params(2, prune_absolute=trail)


@pytest.mark.parametrize("most", [0, -2, 1.5, True])
def test_candidates_per_parent_must_be_a_positive_integer(most: object) -> None:
    with pytest.raises(ValueError, match=f"max_candidates_per_parent={most!r} is not a number of continuations"):
        beam_params(2, max_candidates_per_parent=most)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("prune_relative", 0.5),
        ("prune_absolute", 2),
        ("prune_relative_local", 0.5),
        ("max_candidates_per_parent", 3),
        ("sample_first", 3),
    ],
)
def test_what_vllms_beams_do_not_have_is_refused_under_its_semantics(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f'{option}={value} is not supported under semantics="vllm"'):
        beam_params(2, semantics="vllm", **{option: value})
    assert beam_params(2, **{option: value}).extra_args[option] == value


@pytest.mark.parametrize("drawn", [-1, 1.5, True, "2"])
def test_sample_first_must_be_a_number_of_tokens(drawn: object) -> None:
    with pytest.raises(ValueError, match=f"sample_first={drawn!r} is not a number of tokens"):
        beam_params(2, sample_first=drawn)


def test_a_seed_is_refused_where_nothing_is_drawn() -> None:
    with pytest.raises(ValueError, match="seed=1 has nothing to decide in a beam search"):
        beam_params(2, seed=1)
    assert beam_params(2, seed=1, sample_first=2).seed == 1


def test_no_temperature_leaves_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match=r"temperature=0\.0 leaves sample_first=2 nothing to draw"):
        beam_params(2, temperature=0.0, sample_first=2)


# Engines.


def test_defaults_hold_without_an_entry() -> None:
    assert TrieBeamConfig.from_additional_config(None) == TrieBeamConfig()
    assert TrieBeamConfig.from_additional_config({"somebody_else": 1}) == TrieBeamConfig()


def test_options_are_read() -> None:
    assert TrieBeamConfig.from_additional_config({"trie_beam": {"reclaim_interval": 3}}).reclaim_interval == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reclaim_interval": 0}, "trie_beam.reclaim_interval=0"),
        ({"reclaim_interval": 1.5}, "trie_beam.reclaim_interval=1.5"),
        ({"reclaim_interval": True}, "trie_beam.reclaim_interval=True"),
        ({"max_beam_width": 0}, "trie_beam.max_beam_width=0"),
        ({"max_beam_width": "8"}, "trie_beam.max_beam_width='8'"),
        ({"semantics": "tf"}, "trie_beam.semantics='tf' is unknown; known: 'hf', 'vllm'"),
        ({"check_invariants": "yes"}, "trie_beam.check_invariants='yes'"),
        ({"debug_rank_check": 1}, "trie_beam.debug_rank_check=1 is neither true nor false"),
        ({"speculation": "on"}, "trie_beam.speculation='on' is unknown; known: 'exact', 'sample', 'off'"),
        ({"speculation": True}, "trie_beam.speculation=True is unknown"),
        ({"do_sample": 1}, "trie_beam.do_sample=1 is neither true nor false"),
        ({"replacement": "yes"}, "trie_beam.replacement='yes' is neither true nor false"),
        ({"memory_mode": 0}, "trie_beam.memory_mode=0 is neither true nor false"),
        ({"draft_width": 0}, "trie_beam.draft_width=0 is not a number of beams"),
        ({"min_width": True}, "trie_beam.min_width=True is not a number of beams"),
        ({"min_width": 1.5}, "trie_beam.min_width=1.5 is not a number of beams"),
        ({"threshold": 0}, r"trie_beam.threshold=0 is not a probability; pass a number in \(0, 1\]"),
        ({"threshold": 70}, "trie_beam.threshold=70 is not a probability"),
        (
            {"do_sample": True, "speculation": "exact"},
            'trie_beam.do_sample=True and trie_beam.speculation="exact" exclude each other; use speculation="sample"',
        ),
        (
            {"do_sample": False, "speculation": "sample"},
            'trie_beam.do_sample=False and trie_beam.speculation="sample" exclude each other; use speculation="exact"',
        ),
        ({"draft_widht": 8}, "unknown option trie_beam.draft_widht; did you mean draft_width?"),
        ({"do_sampel": True}, "unknown option trie_beam.do_sampel; did you mean do_sample?"),
        ({"vllm_check": "of"}, "trie_beam.vllm_check='of' is unknown; known: 'strict', 'warn', 'off'"),
        ({"reclaim_intervall": 3}, "did you mean reclaim_interval"),
        ({"zzz": 3}, "known: speculation, .*, reclaim_interval, max_beam_width, semantics, check_invariants"),
        (["reclaim_interval"], "is not a mapping"),
    ],
)
def test_bad_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrieBeamConfig.from_additional_config({"trie_beam": options})


def test_what_requests_get_that_say_nothing_of_speculation() -> None:
    said = {"speculation": "sample", "do_sample": True, "replacement": True, "memory_mode": True}
    said |= {"draft_width": 8, "min_width": 2, "threshold": 0.7}
    assert said.keys() == set(SpeculationOptions.model_fields)
    for one in (said, *({name: value} for name, value in said.items())):  # each alone too: requests may say the rest
        assert TrieBeamConfig.from_additional_config({"trie_beam": one}) == TrieBeamConfig(**one)
        assert vars(TrieBeamConfig(**one)) == vars(TrieBeamConfig()) | one


# How beams are drawn, and speculate.

DO_SAMPLE = [None, False, True]
SPECULATIONS = [None, "off", "exact", "sample"]
EXCLUDED = {(True, "exact"), (False, "sample")}


def resolved(options: dict[str, Any], has_drafts: bool = True, **defaults: Any) -> BeamParams:
    return resolve(BeamParams(**{"beam_width": 4, **options}), TrieBeamConfig(**defaults), has_drafts)


def refusal(text: str) -> Any:
    """A ValueError that says this, at the beginning."""
    return pytest.raises(ValueError, match="^" + re.escape(text))


# Each by itself.


@pytest.mark.parametrize("value", ["on", "EXACT", "", "greedy", True, False, 0, 1, ["exact"], {}])
def test_speculation_must_be_one_of_three(value: Any) -> None:
    with refusal(f"speculation={value!r} is unknown; known: 'exact', 'sample', 'off'"):
        beam_params(4, speculation=value)


@pytest.mark.parametrize("value", ["true", "", 0, 1, 2, 1.0, [True]])
@pytest.mark.parametrize("name", ["do_sample", "replacement", "memory_mode"])
def test_flags_are_true_or_false(name: str, value: Any) -> None:
    with refusal(f"{name}={value!r} is neither true nor false"):
        beam_params(4, **{name: value})


@pytest.mark.parametrize("value", [0, -1, 2.0, 2.5, "8", True, False, math.nan, [8]])
@pytest.mark.parametrize("name", ["draft_width", "min_width"])
def test_widths_are_positive_integers(name: str, value: Any) -> None:
    with refusal(f"{name}={value!r} is not a number of beams; pass an integer >= 1"):
        beam_params(4, **{name: value})


@pytest.mark.parametrize("value", [0, 0.0, -0.1, 1.01, 70, math.nan, math.inf, "0.7", True, False, [0.7]])
def test_threshold_is_a_probability_above_zero(value: Any) -> None:
    with refusal(f"threshold={value!r} is not a probability; pass a number in (0, 1]"):
        beam_params(4, threshold=value)


@pytest.mark.parametrize("threshold", [1, 1.0, 0.7, 1e-9])
def test_thresholds_that_mean_something_pass(threshold: float) -> None:
    assert beam_params(4, threshold=threshold).extra_args["threshold"] == threshold


def test_the_helper_passes_on_what_is_given_and_nothing_else() -> None:
    given = {"speculation": "sample", "do_sample": True, "replacement": False, "memory_mode": False}
    given |= {"draft_width": 8, "min_width": 2, "threshold": 0.7}
    assert given.keys() == set(SpeculationOptions.model_fields)
    assert beam_params(4).extra_args == {"beam_width": 4}
    assert beam_params(4, **given).extra_args.items() >= given.items()
    for name, value in given.items():
        assert beam_params(4, **{name: value}).extra_args == {"beam_width": 4, name: value}


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        *(("draft_widht", "draft_width"), ("draftwidth", "draft_width"), ("num_draft", "draft_width")),
        *(("num_drafts", "draft_width"), ("draft_beam_width", "draft_width"), ("min_widht", "min_width")),
        *(("minwidth", "min_width"), ("min_beam_width", "min_width"), ("treshold", "threshold")),
        *(("thresholds", "threshold"), ("do_samples", "do_sample"), ("dosample", "do_sample")),
        *(("do_sampling", "do_sample"), ("speculations", "speculation"), ("speculate", "speculation")),
        *(("speculative", "speculation"), ("replacment", "replacement"), ("with_replacement", "replacement")),
        *(("memorymode", "memory_mode"), ("memory_mod", "memory_mode")),
    ],
)
def test_a_near_miss_is_refused_and_the_right_name_suggested(typo: str, meant: str) -> None:
    with refusal(f"unknown option {typo}=2; did you mean {meant}?"):
        BeamParams.from_extra_args({"beam_width": 4, typo: 2})


@pytest.mark.parametrize(
    ("name", "value"),
    [("speculation", "off"), ("do_sample", 1), ("memory_mode", 1), ("draft_width", 8), ("min_width", 2)],
)
def test_an_option_without_a_width_is_refused(name: str, value: Any) -> None:
    with refusal(f"{name} given without beam_width; add beam_width"):
        BeamParams.from_extra_args({name: value})


@pytest.mark.parametrize("key", ["threshold", "replacement", "thresholds", "with_replacement"])
def test_a_common_word_without_a_width_may_be_an_option_of_others(key: str) -> None:
    assert BeamParams.from_extra_args({key: 0.5, "theirs": 1}) is None
    with pytest.raises(ValueError, match="given without beam_width"):
        BeamParams.from_extra_args({key: 0.5, "draft_width": 8})


@pytest.mark.parametrize("name", ["do_sample", "replacement", "memory_mode"])
def test_a_server_turns_booleans_into_numbers_and_they_come_back(name: str) -> None:
    parsed = [BeamParams.from_extra_args({"beam_width": 4, name: number}) for number in (0, 1)]
    assert [getattr(beam, name) for beam in parsed] == [False, True]
    for other in (2, -1, 0.0, 1.0, "1"):
        with refusal(f"{name}={other!r} is neither true nor false"):
            BeamParams.from_extra_args({"beam_width": 4, name: other})


def test_a_server_does_not_turn_numbers_into_booleans() -> None:
    beam = BeamParams.from_extra_args({"beam_width": 1, "draft_width": 1, "min_width": 1, "threshold": 1})
    assert beam == BeamParams(beam_width=1, draft_width=1, min_width=1, threshold=1)
    assert [type(value) for value in (beam.draft_width, beam.min_width, beam.threshold)] == [int] * 3


# Together.

SAMPLE, EXACT = {"speculation": "sample"}, {"speculation": "exact"}
DRAWN, NOT_DRAWN = {"do_sample": True}, {"do_sample": False}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (DRAWN | EXACT, 'do_sample=True and speculation="exact" exclude each other; use speculation="sample"'),
        (NOT_DRAWN | SAMPLE, 'do_sample=False and speculation="sample" exclude each other; use speculation="exact"'),
        (NOT_DRAWN | {"replacement": True}, "replacement=True has nothing to draw; set do_sample=True"),
        (EXACT | {"replacement": True}, "replacement=True has nothing to draw; set do_sample=True"),
        *(
            (how | {"semantics": semantics}, f'semantics="{semantics}" does not draw beams; leave do_sample out, or')
            for how, semantics in product((DRAWN, SAMPLE), ("vllm", "tridecode"))
        ),
        *(
            (how | {name: value}, f"{name}={value!r} is not supported together with do_sample; leave one of them out")
            for how in (DRAWN, SAMPLE)
            for name, value in {
                "prune_relative": 0.5,
                "prune_absolute": 2.0,
                "prune_relative_local": 0.5,
                "max_candidates_per_parent": 2,
                "sample_first": 3,
            }.items()
        ),
        *(
            ({"speculation": "off", name: value}, f"{name}={value!r} has no drafts to act on: this search does not")
            for name, value in {"draft_width": 8, "min_width": 2, "threshold": 0.7, "memory_mode": True}.items()
        ),
        *(
            (how | {name: value}, f'{name}={value!r} means nothing where beams are not drawn; set speculation="sample"')
            for how in (EXACT, NOT_DRAWN)
            for name, value in {"min_width": 2, "threshold": 0.7, "memory_mode": True}.items()
        ),
        ({"draft_width": 3}, "draft_width=3 is below beam_width=4, so that no layer could be accepted; raise it"),
        (EXACT | {"draft_width": 1}, "draft_width=1 is below beam_width=4"),
        ({"min_width": 5, "threshold": 0.7}, "min_width=5 exceeds beam_width=4; lower it"),
    ],
)
def test_what_cannot_go_together_is_refused_before_any_engine_sees_it(options: dict, message: str) -> None:
    with refusal(message):
        beam_params(4, **options)
    with refusal(message):
        BeamParams.from_extra_args({"beam_width": 4, **options})


@pytest.mark.parametrize(
    "options",
    [
        SAMPLE | DRAWN | {"replacement": True, "memory_mode": True, "draft_width": 4, "threshold": 1, "min_width": 4},
        EXACT | NOT_DRAWN | {"replacement": False, "memory_mode": False, "draft_width": 4},
        {"speculation": "off", "do_sample": True, "replacement": True, "memory_mode": False},
        {"replacement": True, "min_width": 2},  # the engine may say the rest
        *(EXACT | {"semantics": semantics, "draft_width": 9} for semantics in ("vllm", "tridecode", "hf")),
        EXACT | {"sample_first": 3, "prune_absolute": 2.0},
        DRAWN | {"early_stopping": "never", "length_penalty": -1.0},
    ],
)
def test_what_can_go_together_passes(options: dict) -> None:
    assert beam_params(4, **options).extra_args.items() >= options.items()


def test_a_seed_and_a_temperature_belong_to_what_is_drawn() -> None:
    for options in (DRAWN, SAMPLE):
        assert beam_params(4, seed=1, **options).seed == 1
        with refusal("temperature=0.0 leaves do_sample nothing to draw; raise it"):
            beam_params(4, temperature=0.0, **options)
    for options in ({}, EXACT, NOT_DRAWN):
        with refusal("seed=1 has nothing to decide in a beam search; leave it out, or set do_sample or sample_first"):
            beam_params(4, seed=1, **options)
        assert beam_params(4, temperature=0.0, **options).temperature == 0.0


# With what the engine says.


def expected(
    asked: tuple[bool | None, str | None], says: tuple[bool | None, str | None], has_drafts: bool
) -> tuple[bool, str] | None:
    """Whether beams are drawn, and how they speculate, from the rules; None where the request is refused."""
    do_sample, speculation = asked
    if speculation in ("exact", "sample"):
        return (speculation == "sample", speculation) if has_drafts else None
    draws = do_sample if do_sample is not None else says[0] is True or says[1] == "sample"
    if speculation == "off" or says[1] == "off" or not has_drafts:
        return draws, "off"
    return draws, "sample" if draws else "exact"


@pytest.mark.parametrize("has_drafts", [False, True])
@pytest.mark.parametrize("says", [pair for pair in product(DO_SAMPLE, SPECULATIONS) if pair not in EXCLUDED])
@pytest.mark.parametrize("asked", [pair for pair in product(DO_SAMPLE, SPECULATIONS) if pair not in EXCLUDED])
def test_the_request_counts_then_the_engine_then_the_draft_model(asked: Any, says: Any, has_drafts: bool) -> None:
    options = {"do_sample": asked[0], "speculation": asked[1]}
    outcome = expected(asked, says, has_drafts)
    if outcome is None:
        with refusal(f'speculation="{asked[1]}" needs a draft model; start the engine with speculative_config='):
            resolved(options, has_drafts, do_sample=says[0], speculation=says[1])
    else:
        beam = resolved(options, has_drafts, do_sample=says[0], speculation=says[1])
        assert (beam.do_sample, beam.speculation) == outcome
        assert beam == BeamParams(beam_width=4, semantics="hf", do_sample=beam.do_sample, speculation=beam.speculation)


DEFAULTS = {"replacement": True, "memory_mode": True, "draft_width": 6, "min_width": 3, "threshold": 0.7}


@pytest.mark.parametrize(
    ("options", "has_drafts", "applied"),
    [
        (SAMPLE, True, DEFAULTS),
        (DRAWN, True, DEFAULTS),
        (EXACT, True, {"draft_width": 6}),
        (NOT_DRAWN, True, {"draft_width": 6}),
        ({}, True, {"draft_width": 6}),
        (DRAWN, False, {"replacement": True}),
        (DRAWN | {"speculation": "off"}, True, {"replacement": True}),
        ({"speculation": "off"}, True, {}),
        ({}, False, {}),
    ],
)
def test_of_the_engines_options_those_apply_that_the_search_has_a_use_for(
    options: dict, has_drafts: bool, applied: dict
) -> None:
    beam = resolved(options, has_drafts, **DEFAULTS)
    assert {name: getattr(beam, name) for name in DEFAULTS if getattr(beam, name) is not None} == applied


def test_what_the_request_says_outweighs_the_engine() -> None:
    own = {"replacement": False, "memory_mode": False, "draft_width": 9, "min_width": 1, "threshold": 0.2}
    beam = resolved(SAMPLE | own, **DEFAULTS)
    assert {name: getattr(beam, name) for name in own} == own


def test_the_engines_widths_fit_themselves_to_the_requests() -> None:
    beam = resolved(SAMPLE | {"beam_width": 16}, **DEFAULTS)
    assert (beam.draft_width, beam.min_width) == (16, 3)
    beam = resolved(SAMPLE | {"beam_width": 2}, **DEFAULTS)
    assert (beam.draft_width, beam.min_width) == (6, 2)


def test_the_engine_and_the_request_may_say_half_of_it_each() -> None:
    beam = resolved({"replacement": True}, do_sample=True)
    assert (beam.do_sample, beam.replacement) == (True, True)
    beam = resolved(SAMPLE | {"min_width": 2}, threshold=0.7)
    assert (beam.min_width, beam.threshold) == (2, 0.7)
    beam = resolved(SAMPLE | {"threshold": 0.7}, min_width=2)
    assert (beam.min_width, beam.threshold) == (2, 0.7)
    assert resolved(SAMPLE, min_width=2).min_width is None, "nothing decides the width"


@pytest.mark.parametrize(
    ("options", "has_drafts", "message"),
    [
        ({"replacement": True}, True, "replacement=True has nothing to draw; set do_sample=True"),
        (SAMPLE | {"min_width": 2}, True, "min_width=2 needs a threshold, such as 0.7, to decide the width by"),
        (DRAWN | {"min_width": 2}, False, "min_width=2 has no drafts to act on: this search does not speculate"),
        (DRAWN | {"memory_mode": True}, False, "memory_mode=True has no drafts to act on: this search does not"),
        ({"draft_width": 8}, False, "draft_width=8 has no drafts to act on: this search does not speculate; leave it"),
        ({"threshold": 0.7}, True, 'threshold=0.7 means nothing where beams are not drawn; set speculation="sample"'),
        ({"memory_mode": True}, True, "memory_mode=True means nothing where beams are not drawn; set"),
    ],
)
def test_what_half_a_request_lacks_is_said_once_the_engine_has_been_asked(
    options: dict, has_drafts: bool, message: str
) -> None:
    BeamParams(beam_width=4, **options)
    with refusal(message):
        resolved(options, has_drafts)


@pytest.mark.parametrize(
    "options",
    [
        *({"semantics": semantics} for semantics in ("vllm", "tridecode")),
        {"prune_relative": 0.5},
        {"prune_absolute": 0},
        {"max_candidates_per_parent": 2},
        {"sample_first": 3},
    ],
)
@pytest.mark.parametrize("says", [{"do_sample": True}, {"speculation": "sample"}])
def test_a_search_that_cannot_draw_remains_one_whatever_the_engine_says(options: dict, says: dict) -> None:
    beam = resolved(options, **says, replacement=True, threshold=0.7)
    assert (beam.do_sample, beam.speculation) == (False, "exact")
    assert (beam.replacement, beam.threshold) == (None, None)


def test_what_is_resolved_is_not_checked_again_in_the_engine() -> None:
    """The scheduler builds it from the mapping that the front end puts into the request's ticket."""
    for options, has_drafts in [(SAMPLE, True), (EXACT, True), (DRAWN, False), ({}, False)]:
        beam = resolved(options, has_drafts, **DEFAULTS)
        assert BeamParams.model_construct(**beam.model_dump()) == beam


# By the names of other systems.


FOREIGN = [
    *(("num_beams", "did you mean beam_width?"), ("numBeams", "did you mean beam_width?")),
    *(("beam-width", "did you mean beam_width?"), ("beamWidth", "did you mean beam_width?")),
    *(("beam_size", "did you mean beam_width?"), ("num_return_sequences", "did you mean n?")),
    *(("top_beams", "did you mean n?"), ("best_of", "beam_width is how many beams are searched, n how many")),
    *(("num_beam_groups", "no penalty keeps beams apart"), ("diversity_penalty", "no penalty keeps beams apart")),
    *(("beam_search_diversity_rate", "no penalty"), ("beam_width_array", "a search keeps its width")),
    *(("no_repeat_ngram_size", "repetition_penalty or a logits"), ("use_beam_search", "beam_width alone asks for")),
    *(("early_stop", "did you mean early_stopping?"), ("do_early_stopping", "did you mean early_stopping?")),
    *(("renormalize_logits", "what filters leave out"), ("force_words_ids", "nothing can be made to occur")),
    *(("constraints", "nothing can be made to occur"), ("exponential_decay_length_penalty", "length_penalty is the")),
    *(("patience", "early_stopping decides when"), ("max_new_tokens", "did you mean max_tokens?")),
]


@pytest.mark.parametrize(("name", "cure"), FOREIGN)
def test_a_name_of_another_system_is_refused_wherever_it_stands(name: str, cure: str) -> None:
    with refusal(f"unknown option {name}=3; {cure}"):
        BeamParams.from_extra_args({"beam_width": 4, name: 3})
    with refusal(f"unknown option {name}=3; {cure}"):
        beam_params(4, **{name: 3})
    own = cure.removeprefix("did you mean ").removesuffix("?")
    with refusal(f"unknown option trie_beam.{name}; {own}"):
        TrieBeamConfig.from_additional_config({"trie_beam": {name: 3}})


def test_an_option_of_requests_is_none_of_engines() -> None:
    with refusal("unknown option trie_beam.length_penalty; length_penalty is for requests, each of which has its own"):
        TrieBeamConfig(length_penalty=1.0)


def test_a_helper_called_by_another_name_says_ours() -> None:
    with refusal("unknown option num_beams=8; did you mean beam_width?"):
        beam_params(num_beams=8)
    with refusal("unknown option length_penalti=1.0; did you mean length_penalty?"):
        beam_params(8, length_penalti=1.0)
    with pytest.raises(TypeError, match="zzz"):  # as vLLM says it
        beam_params(8, zzz=1)


@pytest.mark.parametrize("name", ["best_of", "no_repeat_ngram_size", "constraints", "patience", "max_new_tokens"])
def test_names_that_others_may_use_pass_where_there_are_no_beams(name: str) -> None:
    assert BeamParams.from_extra_args({name: 3}) is None


@pytest.mark.parametrize("name", ["num_beams", "beam_search_diversity_rate", "num_beam_groups", "diversity_penalty"])
def test_names_that_only_beam_searches_have_are_refused_without_a_width(name: str) -> None:
    with refusal(f"unknown option {name}=3; "):
        BeamParams.from_extra_args({name: 3})


def test_other_names_are_listed_once_and_are_none_of_ours() -> None:
    names = [name for names in OTHER_NAMES.values() for name in names.split()]
    assert len(names) == len(set(names))
    assert not {*names} & {*BeamParams.model_fields, *TrieBeamConfig.model_fields}
    assert not {*names} & {*SamplingParams.__struct_fields__}


# What comes from the table.


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (BeamParams, {"beam_width": "8"}),
        (BeamParams, {}),
        (BeamParams, {"beam_width": 2, "zzz": 1}),
        (TrieBeamConfig, {"semantics": []}),
    ],
)
def test_a_refusal_is_one_sentence_of_ours(kind: Any, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"beam_width|zzz|semantics") as refused:
        kind(**given)
    assert type(refused.value) is ValueError
    assert "\n" not in str(refused.value)
    assert "pydantic" not in str(refused.value)


def test_every_option_has_a_meaning_and_says_what_is_wrong_with_a_value() -> None:
    for kind in (BeamParams, TrieBeamConfig):
        for name, field in kind.model_fields.items():
            assert field.description, name
            assert choices(field) or field.json_schema_extra["wrong"], name


def test_options_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        BeamParams(beam_width=2).beam_width = 3


def test_the_helper_has_the_signature_and_the_docstring_of_the_table() -> None:
    signature = inspect.signature(beam_params)
    assert [*signature.parameters][:2] == ["beam_width", "n"]
    assert signature.parameters.keys() == {*BeamParams.model_fields, "n", "sampling_params"}
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(beam_params), re.MULTILINE)
    assert {*documented} >= {*BeamParams.model_fields, "n"}
    for name, field in BeamParams.model_fields.items():
        parameter = signature.parameters[name]
        assert parameter.annotation == field.annotation
        assert parameter.default == (inspect.Parameter.empty if field.is_required() else field.default)


def test_the_page_of_options_holds_the_tables() -> None:
    page = PAGE.read_text()
    for table in (markdown_table(BeamParams), markdown_table(TrieBeamConfig), markdown_names()):
        assert f"\n{table}\n" in page, "run python -m tools.options_tables"
    assert with_tables(page) == page
    assert PAGE.parent.parent == ROOT
