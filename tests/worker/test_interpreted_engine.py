"""An engine whose kernels do the work, as on a GPU, finds what one without them finds, and compiles none meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine import Engines
from tests.support.interpreted_engine import jobs, serve, start_pair
from tests.support.interpreter import Interpreter

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(interpreter: Interpreter) -> tuple[Any, ...]:
    by_kernels, _ = interpreter.call("tests.support.interpreted_engine:served")
    return (*by_kernels,)


def test_no_kind_of_request_launches_a_variant_that_was_not_warmed(served: tuple[Any, ...]) -> None:
    new, _, _ = served
    assert new.keys() == jobs().keys()
    assert not any(new.values()), new


def test_searches_find_by_kernels_and_graphs_what_they_find_without(served: tuple[Any, ...], engines: Engines) -> None:
    _, found, num_graphs = served
    expected = dict(serve(start_pair(engines)))
    assert sum(map(len, expected.values())) == 5
    for name, answers in expected.items():
        for own, theirs in zip(found[name], answers, strict=True):
            assert [tokens for tokens, _ in own] == [tokens for tokens, _ in theirs], name
            assert [score for _, score in own] == pytest.approx([score for _, score in theirs], abs=1e-4), name
    assert num_graphs >= 2
