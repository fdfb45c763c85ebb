"""What comes from the table of options."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import pytest
from annotated_types import Le, Lt

from tests.support.engine import ROOT
from tools.options_tables import PAGE, with_tables
from vllm_trie import BeamParams, beam_params
from vllm_trie.options import OPTIONS, EngineOptions, StepOptions
from vllm_trie.options.request import PARTS
from vllm_trie.options.table import option_fault


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (BeamParams, {"beam_width": "8"}),
        (BeamParams, {}),
        (BeamParams, {"beam_width": 2, "zzz": 1}),
        (EngineOptions, {"semantics": []}),
    ],
)
def test_a_refusal_is_one_sentence_of_ours(kind: Any, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"beam_width|zzz|semantics") as refused:
        kind(**given)
    assert type(refused.value) is ValueError
    assert "\n" not in str(refused.value)
    assert "pydantic" not in str(refused.value)


def test_every_option_has_a_meaning_and_says_what_is_wrong_with_a_value() -> None:
    for name, field in (OPTIONS | EngineOptions.model_fields).items():
        assert field.description, name
        assert option_fault(field).startswith("is "), name


def test_a_refusal_has_the_bound_that_a_value_exceeds() -> None:
    for name, field in (OPTIONS | EngineOptions.model_fields).items():
        bounds = [most.le if isinstance(most, Le) else most.lt for most in field.metadata if isinstance(most, Le | Lt)]
        for bound in bounds:
            assert bound == math.inf or f"{bound:,.0f}" in option_fault(field), name


def test_every_option_belongs_to_one_part() -> None:
    of_parts = [name for part in PARTS.values() for name in part.model_fields]
    assert sorted(of_parts) == sorted(BeamParams.model_fields.keys() | StepOptions.model_fields)


def test_options_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        BeamParams(beam_width=2).beam_width = 3


def test_the_helper_has_the_signature_and_the_docstring_of_the_table() -> None:
    signature = inspect.signature(beam_params)
    assert [*signature.parameters][:2] == ["beam_width", "n"]
    assert signature.parameters.keys() == {*OPTIONS, "n", "sampling_params"}
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(beam_params), re.MULTILINE)
    assert {*documented} >= {*OPTIONS, "n"}
    for name, field in OPTIONS.items():
        parameter = signature.parameters[name]
        assert parameter.annotation == field.annotation
        assert parameter.default == (inspect.Parameter.empty if field.is_required() else field.default)


def test_the_page_of_options_holds_the_tables() -> None:
    page = PAGE.read_text()
    assert with_tables(page) == page, "run python -m tools.options_tables"
    assert PAGE.parent.parent == ROOT
