"""Options of one request."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from vllm import SamplingParams

from vllm_trie import beam_params
from vllm_trie.engine.catalogs import num_engine_beams_along
from vllm_trie.entrypoints.requests.limits import BlocksNeeded, RequestLimits, validate_request
from vllm_trie.options import BeamParams, EngineOptions, parse_options
from vllm_trie.options.resolve import resolve_options
from vllm_trie.sampling_params import sampling_params_control_logits, sampling_params_filters, sampling_params_stops
from vllm_trie.search.filters import SearchFilters

LIMITS = RequestLimits(max_num_seqs=64, vocab_size=300, block_size=32, num_blocks=1000)


def check(limits: RequestLimits = LIMITS, prompt_len: int = 10, num_encoded: int = 0, **options: object) -> None:
    params = beam_params(**options)
    beam = parse_options(params.extra_args)
    assert isinstance(beam, BeamParams)
    validate_request(params, beam, limits, BlocksNeeded(prompt_len, beam.beam_width, num_encoded))


@pytest.mark.parametrize("width", [0, -1, 2.5, "8", "many", True, None])
def test_beam_width_must_be_a_positive_integer(width: object) -> None:
    with pytest.raises(ValueError, match=f"beam_width={width!r}"):
        beam_params(width)


@pytest.mark.parametrize("penalty", [math.nan, math.inf, -math.inf, 1e5, -500, 10**400, "1", None, True])
def test_length_penalty_must_be_a_number_that_float32_can_raise_lengths_to(penalty: object) -> None:
    with pytest.raises(ValueError, match="length_penalty="):
        beam_params(2, length_penalty=penalty)


@pytest.mark.parametrize(("semantics", "most"), [(None, 6), ("hf", 6), ("tridecode", 6), ("vllm", 40)])
def test_length_penalty_may_be_greater_where_scores_are_float64_as_vllms(semantics: Any, most: int) -> None:
    bounds = "above -40 and below 40; 1.0" if semantics == "vllm" else "above -6 and below 6, or"
    for sign in (-1, 1):
        assert BeamParams(beam_width=2, semantics=semantics, length_penalty=sign * (most - 1)).length_penalty
        with pytest.raises(ValueError, match=f"length_penalty={sign * most} is not a number {bounds}"):
            BeamParams(beam_width=2, semantics=semantics, length_penalty=sign * most)


@pytest.mark.parametrize("early_stopping", ["always", "False", 2, 1.0, None])
def test_early_stopping_must_be_one_of_three(early_stopping: object) -> None:
    with pytest.raises(ValueError, match="early_stopping="):
        beam_params(2, early_stopping=early_stopping)


def test_unknown_semantics_are_refused() -> None:
    with pytest.raises(ValueError, match="semantics='tree' is unknown; known: 'hf', 'vllm', 'tridecode'"):
        beam_params(2, semantics="tree")


def test_a_request_that_names_no_semantics_gets_the_engines() -> None:
    engine = EngineOptions(semantics="vllm")
    for own, found in ((None, "vllm"), ("hf", "hf")):
        assert resolve_options(BeamParams(beam_width=2, semantics=own), engine, drafts=None).semantics == found


@pytest.mark.parametrize("semantics", ["vllm", "tridecode"])
@pytest.mark.parametrize("early_stopping", [True, "never"])
def test_early_stopping_is_refused_where_it_means_nothing(early_stopping: object, semantics: str) -> None:
    with pytest.raises(ValueError, match=f'early_stopping=.* is not supported together with semantics="{semantics}"'):
        beam_params(2, semantics=semantics, early_stopping=early_stopping)


def test_n_above_the_width_is_refused() -> None:
    with pytest.raises(ValueError, match="n=4 exceeds beam_width=3"):
        beam_params(3, n=4)


@pytest.mark.parametrize(
    "typo", ["beam_widht", "beamwidth", "num_beams", "early_stop", "length_penalti", "early_stoping", "semantic"]
)
def test_a_near_miss_is_refused_without_a_width_too(typo: str) -> None:
    with pytest.raises(ValueError, match=f"unknown option {typo}=.*did you mean (beam_width|length|early|sem)"):
        parse_options({typo: 8})


def test_options_of_others_pass() -> None:
    assert parse_options({"kv_transfer_params": {}, "ec_transfer_params": 1, "width": 8}) is None
    assert parse_options({"kv_transfer_params": {}, "beam_width": 2}) == BeamParams(beam_width=2)
    assert parse_options(None) is None


@pytest.mark.parametrize("width", [1 << 63, 1 << 70])
def test_a_width_that_is_no_number_of_beams_is_named_as_it_was_set(width: int) -> None:
    with pytest.raises(ValueError, match=r"^beam_widths=\[.*\] is not a list of numbers of beams; pass 1 to 4,096"):
        parse_options({"beam_widths": [2, width]})


def test_options_without_a_width_are_refused() -> None:
    with pytest.raises(ValueError, match="length_penalty given without beam_width"):
        parse_options({"length_penalty": 1.0})


def test_booleans_that_became_numbers_on_the_way_are_booleans_again() -> None:
    assert parse_options({"beam_width": 2, "early_stopping": 1}) == BeamParams(beam_width=2, early_stopping=True)
    parsed = parse_options({"beam_width": 2, "early_stopping": 0})
    assert parsed is not None
    assert parsed.early_stopping is False


def test_width_above_the_engines_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="beam_width=65 exceeds max_num_seqs=64; lower it, or raise --max-num-seqs"):
        check(beam_width=65)
    check(beam_width=64)


def test_with_memory_mode_a_search_is_at_most_as_wide_as_a_forest() -> None:
    check(beam_width=512, do_sample=True, speculation="sample", memory_mode=True)
    with pytest.raises(ValueError, match="beam_width=513 exceeds 512, the most with memory_mode; lower it"):
        check(beam_width=513, do_sample=True, speculation="sample", memory_mode=True)


def test_a_trace_is_refused_by_what_the_engine_can_draft() -> None:
    limits = replace(LIMITS, num_draft_layers=4)
    check(limits, beam_width=4, max_tokens=3855, trace=True, speculation="auto")
    check(limits, beam_width=4, max_tokens=7281, trace=True, speculation="exact")
    instead = 'lower one of them, or pass speculation="off"$'
    with pytest.raises(
        ValueError, match=f"4 beams, 64 drafts per step and .* tokens, and at most 262,144 are allowed; {instead}"
    ):
        check(limits, beam_width=4, max_tokens=3856, trace=True, speculation="auto")
    with pytest.raises(ValueError, match="64 beams, 512 drafts per step"):
        check(limits, beam_width=64, max_tokens=512, trace=True, speculation="exact", draft_width=200)
    with pytest.raises(ValueError, match=r"4 beams, 0 drafts per step and .*; lower one of them$"):
        check(limits, beam_width=4, max_tokens=65537, trace=True, speculation="off")


def test_width_above_the_engines_own_limit_is_refused() -> None:
    limits = replace(LIMITS, max_beam_width=16)
    with pytest.raises(ValueError, match="beam_width=17 exceeds max_beam_width=16, the limit of this engine; lower it"):
        check(limits, beam_width=17)
    with pytest.raises(ValueError, match="beam_width=65 exceeds max_beam_width=16"):  # more rows would not help
        check(limits, beam_width=65)
    check(limits, beam_width=16)


def test_width_may_exceed_the_vocabulary() -> None:
    limits = RequestLimits(max_num_seqs=1000, vocab_size=300, block_size=32, num_blocks=10_000)
    check(limits, beam_width=1000)
    with pytest.raises(ValueError, match="beam_width=1001 exceeds max_num_seqs=1000"):
        check(limits, beam_width=1001)


def test_width_that_the_pool_cannot_hold_is_refused() -> None:
    small = RequestLimits(max_num_seqs=64, vocab_size=300, block_size=32, num_blocks=12)
    with pytest.raises(ValueError, match="beam_width=8 with a prompt of 200 tokens needs at least 14 KV blocks"):
        check(small, prompt_len=200, beam_width=8)
    check(small, prompt_len=200, beam_width=6)
    check(small, prompt_len=200, beam_width=8, max_tokens=1)
    with pytest.raises(
        ValueError, match="with a prompt of 4 tokens and 150 encoder outputs needs at least 13 KV blocks"
    ):
        check(small, prompt_len=4, num_encoded=150, beam_width=8)
    check(small, prompt_len=4, num_encoded=128, beam_width=8)


@pytest.mark.parametrize(
    ("stop", "why"),
    [
        (["ab"] * 65, "stop has 65 strings, and in a beam search may have 64; leave some out"),
        (["a", "b" * 257], "stop has a string of 257 characters, and in a beam search may have 256; shorten it"),
        (["b" * 256] * 17, "stop has 4,352 characters in all, and in a beam search may have 4,096; leave some strings"),
    ],
)
def test_stop_strings_have_bounds(stop: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check(beam_width=2, stop=stop)
    check(beam_width=2, stop=[string[:256] for string in stop[:16]])


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
    with pytest.raises(ValueError, match=f'{field}={value} is not supported together with semantics="vllm"'):
        beam_params(2, semantics="vllm", **{field: value})
    assert sampling_params_filters(beam_params(2, **{field: value})) == SearchFilters(**{field: value})


def test_no_temperature_and_no_limit_are_no_filters() -> None:
    assert sampling_params_filters(SamplingParams(temperature=0.0, top_k=-1)) == SearchFilters()


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
    assert sampling_params_control_logits(beam_params(2, **fields)) is controlled


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
    assert sampling_params_stops(params) == (2, 4, 9)
    params = SamplingParams(stop_token_ids=[9, 4], ignore_eos=True)
    params.update_from_generation_config({}, eos_token_id=2)
    assert sampling_params_stops(params) == (4, 9)


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
    with pytest.raises(ValueError, match=f'{option}={value} is not supported together with semantics="vllm"'):
        beam_params(2, semantics="vllm", **{option: value})
    assert beam_params(2, **{option: value}).extra_args[option] == value


@pytest.mark.parametrize("length", [-1, 1.5, True, "2"])
def test_sample_first_must_be_a_number_of_tokens(length: object) -> None:
    with pytest.raises(ValueError, match=f"sample_first={length!r} is not a number of tokens"):
        beam_params(2, sample_first=length)


def test_a_seed_is_refused_where_nothing_is_sampled() -> None:
    with pytest.raises(ValueError, match="seed=1 has no effect in a search that does not sample"):
        beam_params(2, seed=1, do_sample=False)
    assert beam_params(2, seed=1, sample_first=2).seed == 1


def test_no_temperature_leaves_nothing_to_draw() -> None:
    with pytest.raises(
        ValueError, match=r"temperature=0\.0 is not supported together with sample_first=2, .*; raise it"
    ):
        beam_params(2, temperature=0.0, sample_first=2)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"beam_widths": []}, r"beam_widths=\[\] is not a list of numbers of beams"),
        ({"beam_widths": [3, 0]}, "is not a list of numbers of beams"),
        ({"beam_widths": "3"}, "is not a list of numbers of beams"),
        ({"beam_widths": [2, 3], "beam_width": 4}, "beam_width=4 is not the greatest of beam_widths"),
        ({"beam_widths": [2, 3], "do_sample": True}, "not supported together with do_sample"),
        ({"beam_widths": [2, 3], "sample_first": 1}, "not supported together with sample_first=1"),
        ({"beam_widths": [2, 3], "memory_mode": True}, r"not supported together with beam_widths=\[2, 3\]"),
        ({"beam_widths": [2, 3], "semantics": "tridecode"}, 'not supported together with semantics="tridecode"'),
    ],
)
def test_what_widths_do_not_go_with_is_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        BeamParams(**options)


def test_an_engine_that_speculates_does_not_with_several_widths() -> None:
    asked, engine = BeamParams(beam_widths=[2, 3]), EngineOptions(speculation="exact", semantics="vllm")
    resolved = resolve_options(asked, engine, drafts="model")
    assert (resolved.beam_width, resolved.speculation, resolved.semantics) == (3, "off", "hf")


@pytest.mark.parametrize(
    ("options", "num_items", "num_stops", "expected"),
    [
        ({}, 1, 1, 1),
        ({}, 3, 2, 3),
        ({}, 17, 1, 16),
        ({"catalog_stop": True}, 3, 2, 6),
        ({"catalog_items": 2}, 3, 1, 9),
        ({"catalog_items": 2, "catalog_stop": True}, 2, 3, 12),
        ({"catalog_items": 1 << 40}, 2, 1, 16),
        ({"catalog_items": 1 << 40}, 1, 1, 1),
        ({"catalog_after": 7}, 1, 1, 16),
        ({"num_beam_groups": 2, "diversity_penalty": 1}, 3, 1, 6),
        ({"num_beam_groups": 2, "diversity_penalty": 1}, 9, 1, 16),
        ({"num_beam_groups": 8, "diversity_penalty": 1, "catalog_stop": True}, 1, 1, 8),
    ],
)
def test_as_many_beams_live_along_a_catalog_as_there_are_hypotheses(
    options: dict[str, object], num_items: int, num_stops: int, expected: int
) -> None:
    beam = BeamParams(beam_width=16, catalog="items", **options)
    assert num_engine_beams_along(beam, num_items, num_stops) == expected
