"""Metrics by name are sacrebleu's, and how references are weighed."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import sacrebleu
from vllm.outputs import CompletionOutput, RequestOutput

from vllm_trie import BeamParams, HypothesisPair
from vllm_trie.messages import NO_HYPOTHESIS
from vllm_trie.reranking.metrics import rerank_metric_of
from vllm_trie.reranking.offline import _Asked, _rerank, _rerank_weights

PAIRS = [
    HypothesisPair("", hypothesis, reference)
    for hypothesis, reference in [
        ("the cat sat on the mat", "a cat sat on the mat"),
        ("a cat sat on the mat", "the cat sat on the mat today"),
        ("nothing alike", "the cat"),
        ("", "the cat"),
    ]
]
SCORES: dict[str, Any] = {
    "chrf": sacrebleu.sentence_chrf,
    "chrf++": lambda *pair: sacrebleu.sentence_chrf(*pair, word_order=2),
    "bleu": sacrebleu.sentence_bleu,  # with its effective order
    "ter": sacrebleu.sentence_ter,
}


@pytest.mark.parametrize("name", SCORES)
def test_a_metric_by_name_is_sacrebleus_the_higher_the_better(name: str) -> None:
    expected = [SCORES[name](pair.hypothesis, [pair.reference]).score for pair in PAIRS]
    assert rerank_metric_of(name)(PAIRS) == [-score if name == "ter" else score for score in expected]


def test_a_callable_is_its_own_metric() -> None:
    assert rerank_metric_of(len) is len


def test_without_sacrebleu_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(ValueError, match=r"metric='ter' needs sacrebleu; pip install 'vllm_trie\[mbr\]', or pass a"):
        rerank_metric_of("ter")


def test_references_weigh_their_probability_to_a_power_and_what_was_sampled_again_nothing() -> None:
    sampled = [([1, 2], -1.0), ([3], -2.0), ([1, 2], -1.0), ([4], -900.0)]
    pool = [CompletionOutput(0, "", tokens, total, None) for tokens, total in sampled]
    weights = _rerank_weights(pool, 0.5)
    assert weights is not None
    expected = np.exp(0.5 * np.array([-1.0, -2.0, -np.inf, -900.0]))
    np.testing.assert_allclose(weights / weights.sum(), expected / expected.sum())
    assert _rerank_weights(pool, 0.0) is None


def test_where_nothing_was_found_there_is_nothing_to_rank() -> None:
    none = CompletionOutput(0, "", [], 0.0, None, finish_reason="stop", stop_reason=NO_HYPOTHESIS)
    output = RequestOutput("0", "prompt", [1], None, [none, none], finished=True)
    _rerank(output, _Asked("0", BeamParams(beam_width=2, rerank="mbr"), rerank_metric_of("chrf"), 1, None))
    assert [(one.finish_reason, one.stop_reason) for one in output.outputs] == [("stop", NO_HYPOTHESIS)]
