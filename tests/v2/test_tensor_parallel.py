"""On the V2 runner, too, two ranks find what one finds, and know if they do not agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.engines import ParallelEngine
from tests.v2.test_parity import LIMITS, answers, check_answers


def test_two_ranks_find_the_beams_of_transformers(random_model: Callable[[str], Path]) -> None:
    """As V2 runs where nothing else is asked for: asynchronously."""
    model = random_model("gqa")
    engine = ParallelEngine(model, **LIMITS, async_scheduling=True)
    try:
        check_answers(answers(engine), model)
        engine.check_nothing_is_left()
        engine.llm.collective_rpc("go_astray", args=("beams", 1))
        with pytest.raises(RuntimeError, match=r"disagree about the beams of beam group .* \(rank 0 against rank 1\)"):
            answers(engine)
    finally:
        engine.close()
