"""Texts of a few letters in which no n-gram of tokens comes twice, found by trying every token: no masks, no states."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoTokenizer

from tests.support.loop import one_thread
from tests.support.reference import Answer, load

EOS = 1
Tokens = tuple[int, ...]


@cache
def pieces(model: Path, letters: str) -> dict[int, str]:
    """The tokens whose texts are of these letters alone."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
    return {token: text for token, text in texts.items() if text and {*text} <= {*letters}}


def repeats(text: Sequence[int], size: int) -> bool:
    """Whether the last n-gram stands there before."""
    ngrams = [tuple(text[at : at + size]) for at in range(len(text) - size + 1)]
    return len(ngrams) > 1 and ngrams[-1] in ngrams[:-1]


class Letters(NamedTuple):
    """What follows a prompt: so many of some letters, and EOS.

    Args:
        size: Tokens of an n-gram that must not come twice, in the prompt and after it.
    """

    model: Path
    prompt: list[int]
    letters: str
    shortest: int
    longest: int
    size: int

    @property
    def regex(self) -> str:
        return f"[{self.letters}]{{{self.shortest},{self.longest}}}"

    @one_thread()
    @torch.inference_mode()
    def ways(self, tokens: Tokens) -> dict[int, float]:
        """What may come next, with its log-probability among what the grammar allows."""
        own = pieces(self.model, self.letters)
        length = sum(len(own[token]) for token in tokens)
        may_come = [token for token, text in own.items() if length + len(text) <= self.longest]
        may_come += [EOS] if length >= self.shortest else []
        logits = load(self.model)(torch.tensor([[*self.prompt, *tokens]])).logits[0, -1, may_come]
        found = zip(may_come, logits.log_softmax(-1).tolist(), strict=True)
        return {t: logprob for t, logprob in found if not repeats([*self.prompt, *tokens, t], self.size)}

    def all(self, max_tokens: int) -> tuple[list[Answer], int]:
        """Every hypothesis with its sum, the best first, and how many beginnings can take no token at all."""
        running, found, num_stuck = [(Tokens(), 0.0)], list[Answer](), 0
        for length in range(1, max_tokens + 1):
            before, running = running, []
            for tokens, total in before:
                ways = self.ways(tokens)
                num_stuck += not ways
                for token, logprob in ways.items():
                    if token == EOS or length == max_tokens:
                        found.append(Answer([*tokens, token], total + logprob))
                    else:
                        running.append(((*tokens, token), total + logprob))
        return sorted(found, key=lambda answer: -answer.score), num_stuck

    def beams(self, width: int, max_tokens: int) -> list[Answer]:
        """What beam search finds by transformers' rules, `early_stopping=False`; scores are means."""
        running, found = [(Tokens(), 0.0)], list[Answer]()
        for length in range(1, max_tokens + 1):
            ranked = [
                ((*tokens, token), total + logprob)
                for tokens, total in running
                for token, logprob in self.ways(tokens).items()
            ]
            ranked.sort(key=lambda candidate: -candidate[1])
            for tokens, total in ranked[:width]:
                if tokens[-1] == EOS or length == max_tokens:
                    found.append(Answer([*tokens], total / length))
            found = sorted(found, key=lambda answer: -answer.score)[:width]
            running = [candidate for candidate in ranked if candidate[0][-1] != EOS][:width]
            if not running or (len(found) == width and running[0][1] / length <= found[-1].score):
                break
        return found
