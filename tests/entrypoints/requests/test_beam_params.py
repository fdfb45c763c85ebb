"""What `beam_params` refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from vllm_trie import beam_params


def test_what_would_be_said_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="n=2 is not supported together with compact"):
        beam_params(4, n=2, compact=True)
    with pytest.raises(ValueError, match="logprobs=3 is not supported together with compact"):
        beam_params(4, logprobs=3, compact=True)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("ignore_eos", 1, "Expected `bool`, got `int`"),
        ("seed", 1.5, r"Expected `int \| null`, got `float`"),
        ("seed", 1 << 70, "can't serialize ints"),
        ("min_tokens", True, "Expected `int`, got `bool`"),
        ("max_tokens", 1 << 70, "can't serialize ints"),
        ("logit_bias", 1, r"Expected `object \| null`, got `int`"),
        ("logit_bias", {"5": 1.0}, "Expected `int`, got `str`"),
        ("allowed_token_ids", ["x"], "Expected `int`, got `str`"),
        ("output_kind", 2, "Expected `RequestOutputKind`, got `int`"),
        ("structured_outputs", "x", r"Expected `object \| null`, got `str`"),
        ("structured_outputs", {"regex": "x"}, "Expected `StructuredOutputsParams`, got `dict`"),
        ("temperature", None, "Expected `float`, got `None`"),
    ],
    ids=str,
)
def test_a_field_that_no_engine_can_decode_is_refused_by_name(name: str, value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}=.* is of the wrong type: {why}"):
        beam_params(4, **{name: value})


@pytest.mark.parametrize("stop", [{}, ("x",)], ids=str)
def test_stop_must_be_a_list(stop: Any) -> None:
    with pytest.raises(ValueError, match=r"^stop=.* is of the wrong type; pass a string or a list of strings$"):
        beam_params(4, stop=stop)


def test_what_vllm_converts_is_not_refused() -> None:
    grammar = StructuredOutputsParams(regex="x")
    fields = {"temperature": 1, "stop": "x", "stop_token_ids": range(3), "structured_outputs": grammar}
    params = beam_params(4, **fields, output_kind=RequestOutputKind.DELTA, logprobs=True, max_tokens=None)
    assert (params.logprobs, params.stop_token_ids, params.structured_outputs) == (1, [0, 1, 2], grammar)


def test_numbers_of_numpy_are_numbers() -> None:
    params = beam_params(4, temperature=np.float64(0.5), max_tokens=np.int32(7), length_penalty=np.float32(0.5))
    assert (params.temperature, params.max_tokens, params.extra_args["length_penalty"]) == (0.5, 7, 0.5)
    assert [type(number) for number in (params.temperature, params.max_tokens)] == [float, int]
