"""`compact=True`: all hypotheses in one output, the same that n outputs would have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.engine import TRAINED_TARGET, Engine, Engines
from tests.support.pairs import TRAINED, speculating
from tests.support.running import trained_prompts
from vllm_trie import beam_params, hypotheses

pytestmark = pytest.mark.slow

WIDTH = 6


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines(TRAINED_TARGET)


def check(engine: Engine, prompts: list[list[int]], **options: Any) -> None:
    """Raise AssertionError unless all of it is in one output."""
    width = options.pop("beam_width", WIDTH)
    of_n = engine.generate(prompts, beam_params(width, n=width, **options))
    of_one = engine.generate(prompts, beam_params(width, compact=True, **options))
    for plain, compact in zip(of_n, of_one, strict=True):
        expected = [output for output in plain.outputs if output.token_ids]
        (best,), found = compact.outputs, hypotheses(compact)
        assert (best.token_ids, best.finish_reason) == (expected[0].token_ids, expected[0].finish_reason)
        assert len(found) == len(expected)
        assert found.lengths.tolist() == [len(output.token_ids) for output in expected]
        for reason, row, length, output in zip(
            found.finish_reasons, found.token_ids, found.lengths, expected, strict=True
        ):
            ends_in_string = length == options["max_tokens"] and output.stop_reason in options.get("stop", ())
            assert reason == ("length" if ends_in_string else output.finish_reason)
            assert row[:length].tolist() == [*output.token_ids]
            assert (row[length:] == -1).all()
        sums = [output.cumulative_logprob for output in expected]  # which forests of other sizes round otherwise
        np.testing.assert_allclose(found.cumulative_logprobs, sums, rtol=1e-6)
        scores = found.cumulative_logprobs / found.lengths ** options.get("length_penalty", 1.0)
        np.testing.assert_allclose(found.scores, scores, rtol=1e-6)
        assert found.item_ids is None


@pytest.mark.parametrize(
    "options",
    [{}, {"length_penalty": 0.3}, {"semantics": "tridecode"}, {"stop": [",", "("]}, {"top_k": 1}, {"beam_width": 1}],
    ids=str,
)
def test_one_output_has_what_n_outputs_have(engine: Engine, options: dict[str, Any]) -> None:
    check(engine, trained_prompts([20, 45, 70]), max_tokens=12, **options)


def test_counts_of_a_search_that_speculates_stand_beside_its_hypotheses(engines: Engines) -> None:
    engine = speculating(engines, TRAINED, 3)
    check(engine, trained_prompts([30]), max_tokens=12)
    (output,) = engine.generate(trained_prompts([30]), beam_params(WIDTH, compact=True, max_tokens=12))
    assert output.kv_transfer_params["trie_beam"]["steps_per_forward"] >= 1


def test_a_request_that_was_not_compact_is_told_so(engine: Engine) -> None:
    (output,) = engine.generate(trained_prompts([20]), beam_params(2, max_tokens=3))
    with pytest.raises(ValueError, match="it did not ask for them; pass compact=True"):
        hypotheses(output)
