"""What may be contrasted, how, and with what else."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.support.asking import refusal, resolved
from vllm_trie import beam_params
from vllm_trie.options import parse_options
from vllm_trie.options.contrast import check_contrast_option, contrast_option_weights


@pytest.mark.parametrize(
    "value",
    [
        *({"model": "gpt2"}, {"model": None}, {"alpha": 0}, {"alpha": 1.01}, {"alpha": "0.1"}, {"alpha": True}),
        *({"beta": -0.1}, {"beta": 1001}, {"beta": math.inf}, {"beta": math.nan}, {"betta": 1.0}, "draft", 0.5, True),
    ],
)
def test_what_is_no_contrast_is_refused_in_a_sentence_that_says_what_is(value: Any) -> None:
    with refusal(f'contrast={value!r} is not {{"model": "draft", "alpha": a number in (0, 1], "beta": a number from 0'):
        beam_params(4, contrast=value)


def test_what_is_left_out_is_as_in_the_paper() -> None:
    assert contrast_option_weights({}) == contrast_option_weights({"model": "draft"}) == {"alpha": 0.1, "beta": 0.5}
    assert contrast_option_weights({"beta": 1}) == {"alpha": 0.1, "beta": 1.0}


def test_a_json_text_says_the_same() -> None:
    asked = {"model": "draft", "alpha": 0.2, "beta": 0}
    by_text, by_object = (
        parse_options({"beam_width": 4, "contrast": value}) for value in (json.dumps(asked), dict(asked))
    )
    assert by_text == by_object == parse_options(beam_params(4, contrast=asked).extra_args)
    with refusal("contrast='{alpha: 0.2}' is not {"):
        parse_options({"beam_width": 4, "contrast": "{alpha: 0.2}"})


@pytest.mark.parametrize("engine", [None, "auto", "exact", "sample", "off"])
@pytest.mark.parametrize("request_says", [None, "auto", "off"])
def test_steps_are_plain_and_nothing_is_sampled_whatever_the_engine_says(engine: Any, request_says: Any) -> None:
    beam = resolved({"contrast": {}, "speculation": request_says}, semantics="vllm", speculation=engine)
    assert (beam.speculation, beam.do_sample, beam.semantics, beam.draft_width) == ("off", False, "hf", None)


def test_an_engine_must_have_a_draft_model() -> None:
    check_contrast_option(None, "has none")
    check_contrast_option({}, None)
    with refusal("contrast={'beta': 1.0} needs a draft model, and this engine has none; start it with specul"):
        check_contrast_option({"beta": 1.0}, "has none")
