"""An engine with a draft model compiles no kernel while it serves, neither vLLM's nor ours."""

from __future__ import annotations

import pytest

from tests.support.interpreter import Interpreter

pytestmark = pytest.mark.slow


def test_no_kind_of_request_launches_a_variant_that_was_not_warmed(interpreter: Interpreter) -> None:
    new, _ = interpreter.call("tests.support.warm_engine:new_variants")
    assert len(new) == 5
    assert not any(new.values()), new
