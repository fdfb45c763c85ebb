"""Options of a search by steps: by themselves, and together with others."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_trie import beam_params
from vllm_trie.options import parse_options

STEPS: dict[str, Any] = {"unit": "step", "step_stop": ["\n\n"], "scorer": "prm"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": "word"}, "unit='word' is unknown; known: 'token', 'step'"),
        ({"step_stop": []}, r"step_stop=\[\] is not a list of delimiters; pass strings"),
        ({"step_stop": [""]}, r"step_stop=\[''\] is not a list of delimiters; pass strings"),
        ({"step_stop": "\n"}, "is not a list of delimiters; pass strings"),
        ({"candidates": 0}, "candidates=0 is not a number of candidates; pass an integer >= 1"),
        ({"max_steps": 0}, "max_steps=0 is not a number of steps; pass an integer >= 1"),
        ({"allot": "fair"}, "allot='fair' is unknown; known: 'even', 'rebase', 'dvts'"),
        ({"allot": "rebase", "allot_temperature": 0}, "allot_temperature=0 is not a temperature; pass a number > 0"),
        ({"allot": "rebase", "prefer_shared": -1}, "prefer_shared=-1 is not a price of KV; pass a number >= 0"),
        ({"allot": "dvts", "prefer_shared": 0.1}, 'prefer_shared=0.1 acts on shares by score; add allot="rebase", or'),
        ({"order": "depth"}, "order='depth' is unknown; known: 'breadth', 'best', 'mcts'"),
        ({"order": "best"}, 'order="best" may go on forever, since there is always an open candidate; set max_steps'),
        ({"order": "mcts"}, 'order="mcts" may go on forever, since there is always an open candidate; set max_steps'),
        ({"order": "mcts", "max_steps": 3, "exploration": -1}, "exploration=-1 is not a factor; pass a number >= 0"),
        ({"order": "best", "max_steps": 3, "exploration": 2}, "exploration=2 has no effect without order="),
        ({"pool": 4}, 'pool=4 has no effect without order="best" or order="mcts"; add one, or leave it out'),
        ({"order": "best", "max_steps": 3, "pool": -1}, "pool=-1 is not a number of candidates; pass an integer >= 0"),
        ({"lookahead": -1}, "lookahead=-1 is not a number of tokens; pass an integer >= 0"),
        (
            {"order": "best", "max_steps": 3, "allot": "dvts"},
            'allot="dvts" is not supported together with order="best", which expands the best of all subtrees; leave',
        ),
        (
            {"order": "mcts", "max_steps": 3, "allot": "rebase"},
            'allot="rebase" is not supported together with order="mcts", whose own rule decides how many steps each',
        ),
        ({"allot_temperature": 0.5}, 'allot_temperature=0.5 acts on shares by score; add allot="rebase", or leave it'),
        ({"scorer": None}, 'unit="step" needs scorer; pass one'),
        ({"step_stop": None}, 'unit="step" needs step_stop; pass one'),
        ({"early_stopping": "never"}, 'early_stopping="never" is not supported together with unit="step"'),
        *(
            ({name: value}, f'{name}.* is not supported together with unit="step", which samples steps; leave it out')
            for name, value in {
                **{"beam_widths": [2, 4], "length_penalty": 0.0, "semantics": "hf", "prune_relative": 0.5},
                **{"prune_absolute": 0, "prune_relative_local": 0.5, "max_candidates_per_parent": 2},
                **{"sample_first": 1, "compact": True, "do_sample": True, "speculation": "exact", "draft_width": 8},
                **{"catalog": "items", "allowed_sequences": ["a"], "catalog_items": 2, "memory_mode": True},
            }.items()
        ),
    ],
)
def test_what_a_search_by_steps_cannot_have_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        beam_params(4, **STEPS | options)
    with pytest.raises(ValueError, match=message):
        parse_options({"beam_width": 4, **STEPS, **options})


@pytest.mark.parametrize(
    ("name", "value"),
    {"step_stop": ["\n"], "scorer": len, "candidates": 2, "max_steps": 3, "allot": "dvts", "lookahead": 4}.items(),
)
def test_what_steps_have_is_refused_for_tokens(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f'{name}.* needs unit="step"; add it, or leave it out'):
        beam_params(4, **{name: value})


def test_what_a_search_by_steps_can_have_passes_with_the_scorer_itself() -> None:
    options = STEPS | {"scorer": len, "candidates": 2, "max_steps": 3, "early_stopping": True}
    assert beam_params(4, **options).extra_args == {"beam_width": 4, **options}
    options |= {"allot": "rebase", "allot_temperature": 0.5, "prefer_shared": 1, "order": "best", "pool": 0}
    options |= {"lookahead": 8}
    assert beam_params(4, **options).extra_args == {"beam_width": 4, **options}
    beam_params(4, **STEPS, order="mcts", max_steps=2, exploration=0)
    beam_params(4, **STEPS, do_sample=False, speculation="off")  # which it is


def test_words_that_others_may_use_pass_where_there_are_no_beams() -> None:
    assert (
        parse_options({"unit": "kg", "scorer": "rouge", "candidates": 3, "max_steps": 9, "order": "asc", "pool": 3})
        is None
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("presence_penalty", 0.5), ("frequency_penalty", 0.5), ("bad_words", ["a"]), ("min_tokens", 3)),
        *(("prompt_logprobs", 1), ("detokenize", False), ("logprobs", -1), ("temperature", 0.0)),
    ],
)
def test_fields_that_would_act_on_one_step_alone_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f'{field}=.*unit="step"'):
        beam_params(4, **STEPS, **{field: value})
