"""What goes together: the table of it, and the sentences that come from it."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import msgspec
import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.support.asking import refusal as refused
from vllm_trie import beam_params
from vllm_trie.options import OPTIONS
from vllm_trie.options.matrix import CLASHES, FIELDS, NEEDS, options_clash, options_refusal, parsed_option_key
from vllm_trie.options.parts import Steps

PAIRS = [frozenset(pair) for row in CLASHES for pair in product(row.these, row.others)]
VALUES: dict[str, Any] = {"early_stopping": True, "speculation": "exact", "beam_width": "beam_width"}  # of the others 5


def said(*keys: str) -> dict[str, Any]:
    """What someone says who asks for all of these."""
    values = dict(map(parsed_option_key, keys))
    return {name: VALUES.get(name, 5) if value is None else value for name, value in values.items()}


def test_the_table_names_options_and_fields_alone() -> None:
    assert {*FIELDS} <= {*OPTIONS, *(field.name for field in msgspec.structs.fields(SamplingParams))}


def test_a_pair_stands_in_it_once() -> None:
    assert len(PAIRS) == len({*PAIRS})


@pytest.mark.parametrize(
    "pair", [pair for pair in PAIRS if len({parsed_option_key(key)[0] for key in pair}) == 2], ids=sorted
)
def test_a_refusal_names_both_says_why_and_what_would_work(pair: frozenset[str]) -> None:
    why = options_clash(said(*pair))
    assert why is not None
    assert re.fullmatch(r"\S.* is not supported together with .*, (which|whose|where) .+; \w.+", why), why
    assert all(key in why or parsed_option_key(key)[0] in why for key in pair), why


def test_what_asks_for_nothing_goes_with_everything() -> None:
    everything = dict.fromkeys(FIELDS, False) | {"temperature": 1.0, "beam_width": 4}
    assert options_clash(everything | {"do_sample": None}) is None
    assert options_clash({"unit": "step", "speculation": "off", "do_sample": False}) is None
    assert options_clash({"semantics": "vllm", "top_k": -1, "temperature": 0.0}) is None


@pytest.mark.parametrize("need", NEEDS)
def test_what_an_option_needs_is_enough(need: Any) -> None:
    for option in need.these:
        if need.without:
            assert options_refusal(said(option, need.without[0])) is not None
        else:
            assert options_refusal(said(option)) == f"{option if '=' in option else f'{option}=5'} {need.why}"
        for enough in need.needs:
            of_steps = ['unit="step"'] if parsed_option_key(option)[0] in Steps.model_fields else []
            assert options_refusal(said(option, enough, *of_steps)) is None or (option, enough) in NOT_ENOUGH


NOT_ENOUGH = {
    ("memory_mode", "speculation"),
    ("min_width", "speculation"),
    ("threshold", "speculation"),
    ('accept="top_k"', "speculation"),  # but "sample"
    *((name, order) for name in ("pool", "exploration") for order in ('order="best"', 'order="mcts"')),  # but an end
    ('order="mcts"', 'allot="rebase"'),
}
MUST_BE_REFUSED = [  # what these say excludes each other
    {"stochastic": True, "do_sample": True, "num_beam_groups": 2, "diversity_penalty": 0.7},
    {"sample_first": 4, "num_beam_groups": 2, "diversity_penalty": 0.7},
    {"beam_widths": [2, 4, 3], "num_beam_groups": 2, "diversity_penalty": 0.7},
    {"memory_mode": True, "do_sample": True, "stochastic": True},
    {"do_sample": True, "speculation": "exact"},
    {"unit": "step", "step_stop": ["\n"], "scorer": len, "allowed_sequences": [[5]]},
    {"unit": "step", "step_stop": ["\n"], "scorer": len, "compact": True},
    {"do_sample": True, "stochastic": True, "length_penalty": 2.0},
    {"do_sample": True, "stochastic": True, "replacement": True},
    {"allowed_sequences": [[5]], "stop": ["\n"]},
    {"allowed_sequences": [[5]], "structured_outputs": StructuredOutputsParams(regex="a+")},
]


@pytest.mark.parametrize("options", MUST_BE_REFUSED)
def test_what_contradicts_itself_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not supported together with"):
        beam_params(4, **options)


def test_a_refusal_shows_values_as_they_were_asked_for_but_no_long_ones() -> None:
    with refused(
        "early_stopping='never' is not supported together with semantics=\"vllm\", which ends at max_tokens; l"
    ):
        beam_params(2, early_stopping="never", semantics="vllm")
    with pytest.raises(ValueError, match="allowed_sequences=") as long:
        beam_params(2, allowed_sequences=[[token] for token in range(10_000)], sample_first=1)
    assert len(str(long.value)) < 250
