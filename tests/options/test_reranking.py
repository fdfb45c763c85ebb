"""Options of reranking: what they may be, and what they do not go with."""

from __future__ import annotations

import re

import pytest

from tests.support.asking import refusal
from vllm_trie import BeamParams, beam_params


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rerank": "map"}, "rerank='map' is unknown; known: 'mbr'"),
        ({"rerank": "mbr", "metric": "comet"}, "metric='comet' is not a metric; pass a callable, or one of \"chrf\""),
        *(
            (
                {"rerank": "mbr", "rerank_scale": scale},
                f"rerank_scale={scale} is not a power of probabilities; pass a number from 0 to 1,000",
            )
            for scale in (-1, 2000)
        ),
        ({"rerank": "mbr", "rerank_confidence": 1}, "rerank_confidence=1 is not a confidence; pass a number in (0, 1)"),
        ({"metric": "bleu"}, "metric='bleu' acts only with rerank; add rerank=\"mbr\""),
        ({"rerank_scale": 0.5}, "rerank_scale=0.5 acts only with rerank"),
        ({"rerank": "mbr", "compact": True}, "compact=True is not supported together with rerank='mbr'"),
        ({"rerank": "mbr", "trace": True}, "trace=True is not supported together with rerank='mbr'"),
        ({"rerank": "mbr", "allowed_sequences": ["a"]}, "is not supported together with rerank='mbr', which compares"),
        (
            {"rerank": "mbr", "rerank_scale": 0.5, "rerank_confidence": 0.9},
            "whose weights its resampling does not support",
        ),
        ({"rerank": "mbr", "unit": "step", "step_stop": ["."], "scorer": len}, "which samples steps"),
    ],
)
def test_wrong_values_and_company_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        beam_params(2, **options)


def test_a_metric_is_passed_on_as_the_object_that_it_is() -> None:
    def metric(pairs: list[object]) -> list[float]:
        return [0.0] * len(pairs)

    params = beam_params(2, rerank="mbr", metric=metric)
    assert params.extra_args is not None
    assert params.extra_args["metric"] is metric
    with refusal("metric=5 is not a metric"):
        BeamParams(beam_width=2, rerank="mbr", metric=5)
