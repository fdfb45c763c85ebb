"""How beams are sampled, and speculate: by itself, together, and with what the engine says."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest

from tests.support.asking import refusal, resolved
from vllm_trie import BeamParams, beam_params
from vllm_trie.options import EngineOptions, parse_options
from vllm_trie.options.parts import Sampling, Speculating
from vllm_trie.options.resolve import resolve_options
from vllm_trie.options.speculation import Drafts

DO_SAMPLE = [None, False, True]
SPECULATIONS = [None, "off", "auto", "exact", "sample"]
EXCLUDED = {(True, "exact"), (False, "sample")}


@pytest.mark.parametrize("value", ["on", "EXACT", "", "greedy", True, False, 0, 1, ["exact"], {}])
def test_speculation_must_be_one_of_three(value: Any) -> None:
    with refusal(f"speculation={value!r} is unknown; known: 'auto', 'exact', 'sample', 'off'"):
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
    assert given.keys() == {*Sampling.model_fields, *Speculating.model_fields}
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
        parse_options({"beam_width": 4, typo: 2})


@pytest.mark.parametrize(
    ("name", "value"),
    [("speculation", "off"), ("do_sample", 1), ("memory_mode", 1), ("draft_width", 8), ("min_width", 2)],
)
def test_an_option_without_a_width_is_refused(name: str, value: Any) -> None:
    with refusal(f"{name} given without beam_width; add it"):
        parse_options({name: value})


@pytest.mark.parametrize("key", ["threshold", "replacement", "thresholds", "with_replacement"])
def test_a_common_word_without_a_width_may_be_an_option_of_others(key: str) -> None:
    assert parse_options({key: 0.5, "theirs": 1}) is None
    with pytest.raises(ValueError, match="given without beam_width"):
        parse_options({key: 0.5, "draft_width": 8})


@pytest.mark.parametrize("name", ["do_sample", "replacement", "memory_mode"])
def test_a_server_turns_booleans_into_numbers_and_they_come_back(name: str) -> None:
    parsed = [parse_options({"beam_width": 4, name: number}) for number in (0, 1)]
    assert [getattr(beam, name) for beam in parsed] == [False, True]
    for other in (2, -1, 0.0, 1.0, "1"):
        with refusal(f"{name}={other!r} is neither true nor false"):
            parse_options({"beam_width": 4, name: other})


def test_a_server_does_not_turn_numbers_into_booleans() -> None:
    beam = parse_options({"beam_width": 1, "draft_width": 1, "min_width": 1, "threshold": 1})
    assert beam == BeamParams(beam_width=1, draft_width=1, min_width=1, threshold=1)
    assert [type(value) for value in (beam.draft_width, beam.min_width, beam.threshold)] == [int] * 3


SAMPLE, EXACT = {"speculation": "sample"}, {"speculation": "exact"}
SAMPLED, NOT_SAMPLED = {"do_sample": True}, {"do_sample": False}
DRAW = {"do_sample=True": SAMPLED, 'speculation="sample"': SAMPLE}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            SAMPLED | EXACT,
            'do_sample=True is not supported together with speculation="exact", which takes the best; use',
        ),
        (
            NOT_SAMPLED | SAMPLE,
            'do_sample=False is not supported together with speculation="sample", which samples beams; ',
        ),
        (NOT_SAMPLED | {"replacement": True}, "replacement=True acts only on sampling; set do_sample=True"),
        (EXACT | {"replacement": True}, "replacement=True acts only on sampling; set do_sample=True"),
        *(
            (
                how | {"semantics": semantics},
                f'{sampled_by} is not supported together with semantics="{semantics}", which',
            )
            for (sampled_by, how), semantics in product(DRAW.items(), ("vllm", "tridecode"))
        ),
        *(
            (how | {name: value}, f"{name}={value!r} is not supported together with {sampled_by}, which samples")
            for sampled_by, how in DRAW.items()
            for name, value in {
                "prune_relative": 0.5,
                "prune_absolute": 2.0,
                "prune_relative_local": 0.5,
                "max_candidates_per_parent": 2,
                "sample_first": 3,
            }.items()
        ),
        *(
            ({"speculation": "off", name: value}, f"{name}={value!r} has no effect, as this search does not")
            for name, value in {"draft_width": 8, "min_width": 2, "threshold": 0.7, "memory_mode": True}.items()
        ),
        *(
            (how | {name: value}, f'{name}={value!r} has no effect unless beams are sampled; set speculation="sample"')
            for how in (EXACT, NOT_SAMPLED)
            for name, value in {"min_width": 2, "threshold": 0.7, "memory_mode": True}.items()
        ),
        (
            {"draft_width": 3},
            "draft_width=3 is below the number of beams, 4, so that no layer could be accepted; raise it",
        ),
        (EXACT | {"draft_width": 1}, "draft_width=1 is below the number of beams, 4"),
        ({"min_width": 5, "threshold": 0.7}, "min_width=5 exceeds the number of beams, 4; lower it"),
    ],
)
def test_what_cannot_go_together_is_refused_before_any_engine_sees_it(options: dict, message: str) -> None:
    with refusal(message):
        beam_params(4, **options)
    with refusal(message):
        parse_options({"beam_width": 4, **options})


@pytest.mark.parametrize(
    "options",
    [
        SAMPLE | SAMPLED | {"replacement": True, "memory_mode": True, "draft_width": 4, "threshold": 1, "min_width": 4},
        EXACT | NOT_SAMPLED | {"replacement": False, "memory_mode": False, "draft_width": 4},
        {"speculation": "off", "do_sample": True, "replacement": True, "memory_mode": False},
        {"replacement": True, "min_width": 2},  # the engine may say the rest
        *(EXACT | {"semantics": semantics, "draft_width": 9} for semantics in ("vllm", "tridecode", "hf")),
        EXACT | {"sample_first": 3, "prune_absolute": 2.0},
        SAMPLED | {"early_stopping": "never", "length_penalty": -1.0},
    ],
)
def test_what_can_go_together_passes(options: dict) -> None:
    assert beam_params(4, **options).extra_args.items() >= options.items()


def test_a_seed_and_a_temperature_belong_to_what_is_sampled() -> None:
    for sampled_by, options in DRAW.items():
        assert beam_params(4, seed=1, **options).seed == 1
        with refusal(f"temperature=0.0 is not supported together with {sampled_by}, which samples; raise"):
            beam_params(4, temperature=0.0, **options)
    assert beam_params(4, seed=1).seed == 1  # the engine may draw by default
    for options in (EXACT, NOT_SAMPLED):
        with refusal(
            "seed=1 has no effect in a search that does not sample; leave it out, or set do_sample or sample_first"
        ):
            beam_params(4, seed=1, **options)
        assert beam_params(4, temperature=0.0, **options).temperature == 0.0


BY_RANK = {"accept": "top_k"}
STEPS = {"unit": "step", "step_stop": ["\n"], "scorer": len}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accept": "topk"}, "accept='topk' is unknown; known: 'exact', 'top_k'"),
        (BY_RANK | {"accept_top_k": 0}, "accept_top_k=0 is not a number of continuations; pass an integer >= 1"),
        (STEPS | BY_RANK, "accept='top_k' is not supported together with unit=\"step\", which samples steps; leave it"),
        (
            SAMPLE | {"accept_top_k": 2},
            'accept_top_k=2 has no effect without accept="top_k"; add that, or leave it out',
        ),
        *(
            (how | BY_RANK, f'accept="top_k" {why}')
            for how, why in [
                (EXACT, 'has no effect unless beams are sampled; set speculation="sample"'),
                (NOT_SAMPLED, 'has no effect unless beams are sampled; set speculation="sample"'),
                ({"speculation": "off"}, "has no effect, as this search does not speculate; leave it out"),
                (
                    SAMPLED | {"stochastic": True},
                    "is not supported together with stochastic=True, whose steps take no drafts",
                ),
                (SAMPLE | {"threshold": 0.7}, "is not supported together with threshold=0.7, which decides widths by"),
            ]
        ),
    ],
)
def test_drafts_are_accepted_by_rank_where_beams_are_sampled_by_drafts_alone(options: dict, message: str) -> None:
    with refusal(message):
        beam_params(4, **options)
    with refusal(message):
        parse_options({"beam_width": 4, **options})


def test_drafts_are_accepted_by_rank_if_the_request_says_so_alone() -> None:
    assert (resolved(SAMPLE).accept, resolved(SAMPLE | BY_RANK).accept) == ("exact", "top_k")
    with refusal("unknown option trie_beam.accept; accept is an option of requests, not of the engine"):
        EngineOptions(**BY_RANK)
    beam = resolved(SAMPLED | BY_RANK | {"accept_top_k": 3}, threshold=0.7, min_width=2, draft_width=6)
    assert (beam.accept_top_k, beam.draft_width) == (3, 6)
    assert (beam.threshold, beam.min_width) == (None, None), "which does not go with it"
    for how, drafts in [({}, "model"), (SAMPLED, None), (SAMPLED, "ngrams")]:
        with refusal('accept="top_k" '):
            resolved(how | BY_RANK, drafts)
    assert parse_options(BY_RANK) is None, "others may call something so"


# With what the engine says.


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"beam_widths": [2, 4]}, {}),
        ({"num_beam_groups": 2, "diversity_penalty": 0.5}, {}),
        ({"stochastic": True, "do_sample": True}, {}),
        ({}, {"structured_outputs": object()}),
        ({"do_sample": True}, {"structured_outputs": object()}),
    ],
)
def test_a_search_that_forests_do_not_follow_takes_plain_steps(options: dict[str, Any], fields: dict[str, Any]) -> None:
    draws = "do_sample" in options
    for asked in ({}, {"speculation": "auto"}, {"speculation": "sample" if draws else "exact"}, {"draft_width": 8}):
        for says in ({}, {"speculation": "sample" if draws else "exact"}, {"draft_width": 6, "threshold": 0.5}):
            request = BeamParams(beam_width=4, **asked, **options)
            beam = resolve_options(request, EngineOptions(**says), "model", fields)
            assert (beam.do_sample, beam.speculation, beam.draft_width, beam.threshold) == (draws, "off", None, None)
    with refusal("draft_width=8 has no effect, as this search does not"):
        resolve_options(BeamParams(beam_width=4, draft_width=8, **options), EngineOptions(), None, fields)


def expected(
    asked: tuple[bool | None, str | None], says: tuple[bool | None, str | None], drafts: Drafts | None
) -> tuple[bool, str] | None:
    """Whether beams are sampled, and how they speculate, from the rules; None where the request is refused."""
    do_sample, speculation = asked
    if speculation in ("exact", "sample"):
        will_do = {None: [], "ngrams": ["exact"], "model": ["exact", "sample"]}[drafts]
        return (speculation == "sample", speculation) if speculation in will_do else None
    draws = do_sample if do_sample is not None else says[0] is True or says[1] == "sample"
    wanted = speculation or says[1]
    if wanted == "off" or drafts is None or (draws and drafts == "ngrams"):
        return draws, "off"
    if draws:
        return draws, "sample"
    return draws, "exact" if wanted == "exact" or drafts == "ngrams" else "auto"


@pytest.mark.parametrize("drafts", [None, "ngrams", "model"])
@pytest.mark.parametrize("says", [pair for pair in product(DO_SAMPLE, SPECULATIONS) if pair not in EXCLUDED])
@pytest.mark.parametrize("asked", [pair for pair in product(DO_SAMPLE, SPECULATIONS) if pair not in EXCLUDED])
def test_the_request_counts_then_the_engine_then_its_drafts(asked: Any, says: Any, drafts: Any) -> None:
    options = {"do_sample": asked[0], "speculation": asked[1]}
    outcome = expected(asked, says, drafts)
    if outcome is None:
        what = "drafts; start" if asked[1] == "exact" else "a draft model" + (", by" if drafts else "; start")
        with refusal(f'speculation="{asked[1]}" needs {what}'):
            resolved(options, drafts, do_sample=says[0], speculation=says[1])
    else:
        beam = resolved(options, drafts, do_sample=says[0], speculation=says[1])
        assert (beam.do_sample, beam.speculation) == outcome
        assert beam == BeamParams(beam_width=4, semantics="hf", do_sample=beam.do_sample, speculation=beam.speculation)


DEFAULTS = {"replacement": True, "memory_mode": True, "draft_width": 6, "min_width": 3, "threshold": 0.7}


@pytest.mark.parametrize(
    ("options", "drafts", "applied"),
    [
        (SAMPLE, "model", DEFAULTS),
        (SAMPLED, "model", DEFAULTS),
        (EXACT, "model", {"draft_width": 6}),
        (NOT_SAMPLED, "model", {"draft_width": 6}),
        ({}, "model", {"draft_width": 6}),
        (SAMPLED, None, {"replacement": True}),
        (SAMPLED, "ngrams", {"replacement": True}),
        ({}, "ngrams", {"draft_width": 6}),
        (SAMPLED | {"speculation": "off"}, "model", {"replacement": True}),
        ({"speculation": "off"}, "model", {}),
        ({}, None, {}),
    ],
)
def test_of_the_engines_options_those_apply_that_the_search_has_a_use_for(
    options: dict, drafts: Drafts | None, applied: dict
) -> None:
    beam = resolved(options, drafts, **DEFAULTS)
    assert {name: getattr(beam, name) for name in DEFAULTS if getattr(beam, name) is not None} == applied


def test_what_the_request_says_outweighs_the_engine() -> None:
    own = {"replacement": False, "memory_mode": False, "draft_width": 9, "min_width": 1, "threshold": 0.2}
    beam = resolved(SAMPLE | own, **DEFAULTS)
    assert {name: getattr(beam, name) for name in own} == own


def test_a_greedy_request_is_not_sampled_because_the_engine_draws() -> None:
    for says in ({"do_sample": True}, {"speculation": "sample"}):
        beam = resolve_options(BeamParams(beam_width=4), EngineOptions(**says), "model", {"temperature": 0.0})
        assert (beam.do_sample, beam.speculation) == (False, "auto")


def test_a_refusal_by_the_engines_semantics_names_what_the_request_says() -> None:
    for sampled_by, how in DRAW.items():
        with refusal(
            f'{sampled_by} is not supported together with semantics="tridecode", which does not sample beams; leave'
        ):
            resolved(how, "model", semantics="tridecode")


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
    ("options", "drafts", "message"),
    [
        ({"replacement": True}, "model", "replacement=True acts only on sampling; set do_sample=True"),
        (SAMPLE | {"min_width": 2}, "model", "min_width=2 needs a threshold, such as 0.7, to decide the width by"),
        (SAMPLED | {"min_width": 2}, None, "min_width=2 has no effect, as this search does not speculate"),
        (SAMPLED | {"memory_mode": True}, None, "memory_mode=True has no effect, as this search does not"),
        (SAMPLED | {"draft_width": 8}, "ngrams", "draft_width=8 has no effect, as this search does not speculate"),
        ({"draft_width": 8}, None, "draft_width=8 has no effect, as this search does not speculate; leave it"),
        (
            {"threshold": 0.7},
            "model",
            'threshold=0.7 has no effect unless beams are sampled; set speculation="sample"',
        ),
        ({"memory_mode": True}, "model", "memory_mode=True has no effect unless beams are sampled; set"),
    ],
)
def test_what_half_a_request_lacks_is_said_once_the_engine_has_been_asked(
    options: dict, drafts: Drafts | None, message: str
) -> None:
    BeamParams(beam_width=4, **options)
    with refusal(message):
        resolved(options, drafts)


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
    assert (beam.do_sample, beam.speculation) == (False, "auto")
    assert (beam.replacement, beam.threshold) == (None, None)


def test_what_is_resolved_is_not_checked_again_in_the_engine() -> None:
    """The scheduler builds it from the mapping that the front end puts into the request's ticket."""
    for options, drafts in [(SAMPLE, "model"), (EXACT, "ngrams"), (SAMPLED, None), ({}, None)]:
        beam = resolved(options, drafts, **DEFAULTS)
        assert BeamParams.model_construct(**beam.model_dump()) == beam
