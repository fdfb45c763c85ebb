"""Contrastive decoding with beams, written down once more from the papers: slow, a hypothesis at a time, in float64.

A token counts (1 + beta) log p - beta log q where p >= alpha max p, as in O'Brien and Lewis 2023, Algorithm 2, whose
logits are log-probabilities here; beams compete by sums that are not renormalised, as in Li et al. 2022, section 3.4.
"""

from __future__ import annotations

from math import exp, inf, log
from pathlib import Path
from typing import NamedTuple

import torch

from tests.support.loop import one_thread
from tests.support.pairs import Pair
from tests.support.reference import load

EOS = 1


class Contrasted(NamedTuple):
    """A finished hypothesis."""

    token_ids: list[int]
    sum_logprobs: float  # of the expert
    score: float


def contrasted_scores(expert: list[float], amateur: list[float], alpha: float, beta: float) -> list[float]:
    """What each token counts, by the log-probabilities of both models; -inf where it is not plausible."""
    cutoff = log(alpha) + max(expert)
    return [
        (1 + beta) * log_p - beta * log_q if log_p >= cutoff else -inf
        for log_p, log_q in zip(expert, amateur, strict=True)
    ]


def difference_scores(expert: list[float], amateur: list[float], alpha: float) -> list[float]:
    """The same by Li et al., equations 2 to 4: log p - log q."""
    head = {token for token, log_p in enumerate(expert) if exp(log_p) >= alpha * exp(max(expert))}
    return [expert[token] - amateur[token] if token in head else -inf for token in range(len(expert))]


class Weights(NamedTuple):
    """The options of the same names."""

    alpha: float = 0.1
    beta: float = 0.5


@one_thread()
@torch.inference_mode()
def logprobs_by(model: Path, texts: list[list[int]], num_last: int = 1) -> list[list[list[float]]]:
    """By text, of equal lengths: what a model says of each token that may come in the last places, [places, V]."""
    logits: torch.Tensor = load(model)(torch.tensor(texts), logits_to_keep=num_last).logits
    return logits.double().log_softmax(-1).tolist()


def score_of(pair: Pair, prompt: list[int], tokens: list[int], weights: Weights) -> float:
    """The sum of what the tokens of a hypothesis count."""
    expert, amateur = (logprobs_by(model, [[*prompt, *tokens][:-1]], len(tokens))[0] for model in pair)
    rows = zip(expert, amateur, tokens, strict=True)
    return sum(contrasted_scores(of_expert, of_amateur, *weights)[token] for of_expert, of_amateur, token in rows)


def contrasted_beams(
    pair: Pair, prompt: list[int], width: int, weights: Weights, max_tokens: int, length_penalty: float = 1.0
) -> list[Contrasted]:
    """The hypotheses of beam search by transformers' rules, `early_stopping=False`, with contrasted scores.

    Args:
        pair: The expert and the amateur.
    """
    running, finished = [(0.0, 0.0, list[int]())], list[Contrasted]()
    for length in range(1, max_tokens + 1):
        texts = [prompt + tokens for *_, tokens in running]
        expert, amateur = ([row for (row,) in logprobs_by(model, texts)] for model in pair)
        rows = zip(running, expert, amateur, strict=True)
        found = [
            (score + gain, total + of_expert[token], [*tokens, token])
            for (score, total, tokens), of_expert, of_amateur in rows
            for token, gain in enumerate(contrasted_scores(of_expert, of_amateur, *weights))
            if gain > -inf
        ]
        found = sorted(found, key=lambda candidate: -candidate[0])[: 2 * width]
        ends = [tokens[-1] == EOS or length == max_tokens for *_, tokens in found]
        for (score, total, tokens), is_over in zip(found[:width], ends, strict=False):
            if is_over:
                finished.append(Contrasted(tokens, total, score / length**length_penalty))
        finished = sorted(finished, key=lambda hypothesis: -hypothesis.score)[:width]
        running = [candidate for candidate, is_over in zip(found, ends, strict=True) if not is_over][:width]
        if not running or (len(finished) == width and running[0][0] / length**length_penalty <= finished[-1].score):
            break
    return finished
