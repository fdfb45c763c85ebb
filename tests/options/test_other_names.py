"""Options by the names of other systems."""

from __future__ import annotations

import pytest
from vllm import SamplingParams

from tests.support.asking import refusal
from vllm_trie import beam_params
from vllm_trie.options import OPTIONS, EngineOptions, parse_options
from vllm_trie.options.request import refuse_other_option_names
from vllm_trie.options.table import OTHER_NAMES

FOREIGN = [
    *(("num_beams", "did you mean beam_width?"), ("numBeams", "did you mean beam_width?")),
    *(("beam-width", "did you mean beam_width?"), ("beamWidth", "did you mean beam_width?")),
    *(("beam_size", "did you mean beam_width?"), ("num_return_sequences", "did you mean n?")),
    *(("top_beams", "did you mean n?"), ("best_of", "beam_width is the number of beams, n the number of")),
    *(("diverse_beam_groups", "did you mean num_beam_groups?"), ("diversity_rate", "num_beam_groups with a diversity")),
    *(("diverse_beam_strength", "did you mean diversity_penalty?"), ("stochastic_beams", "did you mean stochastic?")),
    *(("beam_search_diversity_rate", "num_beam"), ("beam_width_array", "did you mean beam_widths?")),
    *(("block_ngram_repeat", "did you mean no_repeat_ngram_size?"), ("use_beam_search", "beam_width alone asks for")),
    ("encoder_no_repeat_ngram_size", "no_repeat_ngram_size, which looks through the prompt and the answer, comes"),
    *(("early_stop", "did you mean early_stopping?"), ("do_early_stopping", "did you mean early_stopping?")),
    *(("renormalize_logits", "filters never renormalize"), ("force_words_ids", "no phrase can be forced to occur")),
    *(("constraints", "no phrase can be forced"), ("exponential_decay_length_penalty", "length_penalty is the")),
    *(("exclude_ids", "did you mean exclude_items?"), ("excluded_items", "did you mean exclude_items?")),
    *(("patience", "early_stopping decides when"), ("max_new_tokens", "did you mean max_tokens?")),
]


@pytest.mark.parametrize(("name", "cure"), FOREIGN)
def test_a_name_of_another_system_is_refused_wherever_it_stands(name: str, cure: str) -> None:
    with refusal(f"unknown option {name}=3; {cure}"):
        parse_options({"beam_width": 4, name: 3})
    with refusal(f"unknown option {name}=3; {cure}"):
        beam_params(4, **{name: 3})
    own = cure.removeprefix("did you mean ").removesuffix("?")
    with refusal(f"unknown option trie_beam.{name}; {own}"):
        EngineOptions.from_additional_config({"trie_beam": {name: 3}})


def test_an_option_of_requests_is_none_of_engines() -> None:
    with refusal("unknown option trie_beam.length_penalty; length_penalty is an option of requests, not of the engine"):
        EngineOptions(length_penalty=1.0)


def test_a_helper_called_by_another_name_says_ours() -> None:
    with refusal("unknown option num_beams=8; did you mean beam_width?"):
        beam_params(num_beams=8)
    with refusal("unknown option length_penalti=1.0; did you mean length_penalty?"):
        beam_params(8, length_penalti=1.0)
    with refusal("unknown option max_token=3; did you mean max_tokens?"):
        beam_params(8, max_token=3)
    with refusal("unknown option zzz=1; known: beam_width, "):
        beam_params(8, zzz=1)
    with refusal("temperature='hot' is of the wrong type: "):  # and not min_tokens, which needs max_tokens
        beam_params(8, min_tokens=20, max_tokens=64, temperature="hot")


def test_a_helper_takes_each_option_once() -> None:
    with refusal("beam_width is in extra_args; pass it as a separate argument"):
        beam_params(4, extra_args={"beam_width": 3})
    for n in ("2", None, 2.0, True):
        with refusal(f"n={n!r} is not a number of hypotheses; pass an integer from 1 to beam_width"):
            beam_params(4, n=n)


@pytest.mark.parametrize("name", ["num_beams", "beamWidth", "best_of"])
def test_other_names_of_the_width_name_n_where_that_is_the_width(name: str) -> None:
    with refusal(f"unknown option {name}=3; with use_beam_search, n is the number of beams"):
        refuse_other_option_names({name: 3}, n_is_width=True)
    with refusal("unknown option num_return_sequences=3; did you mean n?"):
        refuse_other_option_names({"num_return_sequences": 3}, n_is_width=True)


@pytest.mark.parametrize(
    "name", ["best_of", "encoder_no_repeat_ngram_size", "constraints", "patience", "max_new_tokens"]
)
def test_names_that_others_may_use_pass_where_there_are_no_beams(name: str) -> None:
    assert parse_options({name: 3}) is None


@pytest.mark.parametrize("name", ["num_beams", "beam_search_diversity_rate", "diverse_beam_groups", "diversity_rate"])
def test_names_that_only_beam_searches_have_are_refused_without_a_width(name: str) -> None:
    with refusal(f"unknown option {name}=3; "):
        parse_options({name: 3})


def test_other_names_are_listed_once_and_are_none_of_ours() -> None:
    names = [name for names in OTHER_NAMES.values() for name in names.split()]
    assert len(names) == len(set(names))
    assert not {*names} & {*OPTIONS, *EngineOptions.model_fields}
    assert not {*names} & {*SamplingParams.__struct_fields__}
