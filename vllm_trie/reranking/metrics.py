"""Metrics that judge a hypothesis by a reference: a callable, or one of sacrebleu's metrics by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias


class HypothesisPair(NamedTuple):
    """The input of a metric.

    Args:
        prompt: The text of the prompt.
        hypothesis: A text of the pool.
        reference: A text of the pool that is taken as the correct one.
    """

    prompt: str
    hypothesis: str
    reference: str


Metric: TypeAlias = Callable[[list[HypothesisPair]], Iterable[Any]]  # a number for each, the higher the better


def rerank_metric_of(metric: str | Metric) -> Metric:
    """The metric of a request, as a callable.

    Raises:
        ValueError: it needs sacrebleu, which is not installed.
    """
    if not isinstance(metric, str):
        return metric
    try:
        from sacrebleu.metrics import BLEU, CHRF, TER
    except ImportError:
        raise ValueError(
            f"metric={metric!r} needs sacrebleu; pip install 'vllm_trie[mbr]', or pass a callable"
        ) from None
    if metric == "ter":  # an error rate: the lower, the better
        errors = TER()
        return lambda pairs: [-errors.sentence_score(pair.hypothesis, [pair.reference]).score for pair in pairs]
    scores = BLEU(effective_order=True) if metric == "bleu" else CHRF(word_order=2 if metric == "chrf++" else 0)
    return lambda pairs: [scores.sentence_score(pair.hypothesis, [pair.reference]).score for pair in pairs]
