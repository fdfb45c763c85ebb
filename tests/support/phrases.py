"""Beam search by phrases that add to scores, written down once more: slow, and without automata or tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tests.support.reference import load

Phrases = Sequence[tuple[list[list[int]], float]]  # all ways to write one, and its weight

EOS = 1


class Biased(NamedTuple):
    """A finished hypothesis."""

    token_ids: list[int]
    sum_logprobs: float
    score: float


def boost_of(phrases: Phrases, tokens: list[int], is_over: bool = False) -> float:
    """What phrases add to the score of a hypothesis."""
    ends = range(1, len(tokens) + 1)
    counted = sum(
        weight
        for ways, weight in phrases
        for end in ends
        if any(len(way) <= end and tokens[end - len(way) : end] == way for way in ways)
    )
    pending = [
        weight * length / len(way)
        for ways, weight in phrases
        for way in ways
        for length in range(1, len(way))
        if len(tokens) >= length and tokens[-length:] == way[:length]
    ]
    return counted + (0.0 if is_over else max(pending, default=0.0))


@torch.inference_mode()
def next_logprobs(model: Path, prompt: list[int], beams: list[list[int]]) -> list[list[float]]:
    """By beam: what the model says of each token that may come next."""
    logits = load(model)(torch.tensor([prompt + beam for beam in beams]), logits_to_keep=1).logits[:, -1]
    return logits.float().log_softmax(-1).tolist()


def _worth_a_look(row: list[float], count: int, phrases: Phrases) -> list[int]:
    """All tokens that may be among the best `count`: what is in no phrase has the same boost, whatever it is."""
    special = {EOS, *(token for ways, _ in phrases for way in ways for token in way)}
    others = sorted(set(range(len(row))) - special, key=lambda token: -row[token])
    return sorted([*special, *others[:count]])


def biased_beams(
    model: Path, prompt: list[int], width: int, phrases: Phrases, max_tokens: int, length_penalty: float = 1.0
) -> list[Biased]:
    """The hypotheses of beam search by transformers' rules, `early_stopping=False`, whose scores have the boosts."""
    running, finished = [(0.0, list[int]())], list[Biased]()
    for length in range(1, max_tokens + 1):
        rows = next_logprobs(model, prompt, [tokens for _, tokens in running])
        found = []
        for (total, tokens), row in zip(running, rows, strict=True):
            for token in _worth_a_look(row, 2 * width, phrases):
                is_over = token == EOS or length == max_tokens
                whole = [*tokens, token]
                summed = total + row[token]
                found.append((summed + boost_of(phrases, whole, is_over), summed, whole, is_over))
        found.sort(key=lambda candidate: -candidate[0])
        for score, total, tokens, is_over in found[:width]:
            if is_over:
                finished.append(Biased(tokens, total, score / length**length_penalty))
        finished = sorted(finished, key=lambda hypothesis: -hypothesis.score)[:width]
        alive = [candidate for candidate in found[: 2 * width] if not candidate[3]][:width]
        if not alive or (len(finished) == width and alive[0][0] / length**length_penalty <= finished[-1].score):
            break
        running = [(total, tokens) for _, total, tokens, _ in alive]
    return finished
