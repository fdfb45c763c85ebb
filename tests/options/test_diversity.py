"""Options that keep hypotheses apart: what they may be, and what they do not go with."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from tests.support.asking import refusal, resolved
from vllm_trie import BeamParams, beam_params
from vllm_trie.options import parse_options


@pytest.mark.parametrize("value", [-1, 65, 1.5, True, "2", None])
def test_no_repeat_ngram_size_is_a_number_of_tokens(value: object) -> None:
    with refusal(f"no_repeat_ngram_size={value!r} is not a number of tokens; pass an integer from 0 to 64"):
        BeamParams(beam_width=2, no_repeat_ngram_size=value)


@pytest.mark.parametrize("semantics", ["hf", "vllm", "tridecode"])
def test_no_repeat_ngram_size_goes_with_any_search(semantics: str) -> None:
    for options in ({"semantics": semantics}, {"do_sample": True}):
        beam = parse_options(beam_params(4, no_repeat_ngram_size=3, **options).extra_args)
        assert beam == BeamParams(beam_width=4, no_repeat_ngram_size=3, **options)


GROUPED = {"num_beam_groups": 2, "diversity_penalty": 0.5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beam_groups": 0}, "num_beam_groups=0 is not a number of groups; pass an integer >= 1"),
        ({"num_beam_groups": True}, "num_beam_groups=True is not a number of groups"),
        ({"diversity_penalty": -0.1}, "diversity_penalty=-0.1 is not a difference of log-probabilities"),
        (
            {"diversity_penalty": 1e10},
            "diversity_penalty=10000000000.0 is not a difference of log-probabilities; pass a number from 0 to 10,000",
        ),
        ({"diversity_penalty": math.inf}, "diversity_penalty=inf is not a difference of log-probabilities"),
        (
            GROUPED | {"num_beam_groups": 3},
            "num_beam_groups=3 does not divide the 4 beams; pass a number that does",
        ),
        (GROUPED | {"num_beam_groups": 8}, "num_beam_groups=8 does not divide the 4 beams"),
        ({"num_beam_groups": 2}, "num_beam_groups=2 needs a diversity_penalty above 0, or all groups are equal"),
        ({"diversity_penalty": 0.5}, "diversity_penalty=0.5 needs more than one group of beams; set num_beam_groups"),
        *(
            (GROUPED | other, f"num_beam_groups=2 is not supported together with {what}, ")
            for other, what in [
                ({"do_sample": True}, "do_sample=True"),
                ({"speculation": "sample"}, 'speculation="sample"'),
                ({"sample_first": 2}, "sample_first=2"),
                ({"semantics": "vllm"}, 'semantics="vllm"'),
                ({"semantics": "tridecode"}, 'semantics="tridecode"'),
                ({"beam_widths": [2, 4]}, "beam_widths=[2, 4]"),
            ]
        ),
        (GROUPED | {"speculation": "sample"}, 'num_beam_groups=2 is not supported together with speculation="sample"'),
    ],
)
def test_what_groups_do_not_go_with_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        beam_params(4, **options)


def test_an_engine_that_speculates_or_draws_does_not_with_groups() -> None:
    for says in ({"speculation": "exact"}, {"do_sample": True}, {"speculation": "sample"}, {"semantics": "vllm"}):
        beam = resolved(GROUPED, **says)
        assert (beam.do_sample, beam.speculation, beam.semantics) == (False, "off", "hf")


STOCHASTIC = {"do_sample": True, "stochastic": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stochastic": 1}, "stochastic=1 is neither true nor false"),
        ({"do_sample": False, "stochastic": True}, "stochastic=True acts only on sampling; set do_sample=True"),
        ({"speculation": "exact", "stochastic": True}, "stochastic=True acts only on sampling; set do_sample=True"),
        *(
            (STOCHASTIC | {name: value}, f"{name}={value!r} is not supported together with stochastic=True, ")
            for name, value in [
                ("replacement", True),
                ("length_penalty", 0.0),
                ("length_penalty", 2),
                ("early_stopping", True),
                ("early_stopping", "never"),
                ("memory_mode", True),
            ]
        ),
    ],
)
def test_what_draws_of_whole_hypotheses_do_not_go_with_is_refused(options: dict[str, Any], message: str) -> None:
    with refusal(message):
        BeamParams(beam_width=4, **options)


def test_an_engine_says_whether_to_draw_but_not_how_where_whole_hypotheses_are_sampled() -> None:
    beam = resolved({"stochastic": True}, do_sample=True, replacement=True, speculation="sample", threshold=0.7)
    assert (beam.do_sample, beam.speculation, beam.replacement, beam.threshold) == (True, "off", None, None)
    with refusal("stochastic=True acts only on sampling; set do_sample=True"):
        resolved({"stochastic": True})


def test_a_server_sends_them_as_numbers() -> None:
    beam = parse_options({"beam_width": 4, "do_sample": 1, "stochastic": 1, "no_repeat_ngram_size": 1})
    assert beam == BeamParams(beam_width=4, do_sample=True, stochastic=True, no_repeat_ngram_size=1)
    assert type(beam.no_repeat_ngram_size) is int
    assert parse_options({"beam_width": 4, **GROUPED}) == BeamParams(beam_width=4, **GROUPED)
