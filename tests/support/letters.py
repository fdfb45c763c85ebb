"""Texts of a few letters in which no n-gram of tokens comes twice, found by trying every token: no masks, no states."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoTokenizer

from tests.support.loop import one_thread
from tests.support.next_logits import NextLogits
from tests.support.reference import Answer

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
    def ways(self, beginnings: Sequence[Tokens], next_logits: NextLogits) -> list[dict[int, float]]:
        """What may come next behind each of equal length, with its log-probability among what the grammar allows."""
        rows = next_logits([[*self.prompt, *tokens] for tokens in beginnings])
        return [self._ways(tokens, logits) for tokens, logits in zip(beginnings, rows, strict=True)]

    def _ways(self, tokens: Tokens, logits: torch.Tensor) -> dict[int, float]:
        own = pieces(self.model, self.letters)
        length = sum(len(own[token]) for token in tokens)
        may_come = [token for token, text in own.items() if length + len(text) <= self.longest]
        may_come += [EOS] if length >= self.shortest else []
        found = zip(may_come, logits[may_come].log_softmax(-1).tolist(), strict=True)
        return {t: logprob for t, logprob in found if not repeats([*self.prompt, *tokens, t], self.size)}

    def all(self, max_tokens: int) -> tuple[list[Answer], int]:
        """Every hypothesis with its sum, the best first, and how many beginnings can take no token at all."""
        running, found, num_stuck, next_logits = [(Tokens(), 0.0)], list[Answer](), 0, NextLogits(self.model)
        for length in range(1, max_tokens + 1):
            if not running:
                break
            before, running = running, []
            ways_of_all = self.ways([tokens for tokens, _ in before], next_logits)
            for (tokens, total), ways in zip(before, ways_of_all, strict=True):
                num_stuck += not ways
                for token, logprob in ways.items():
                    if token == EOS or length == max_tokens:
                        found.append(Answer([*tokens, token], total + logprob))
                    else:
                        running.append(((*tokens, token), total + logprob))
        return sorted(found, key=lambda answer: -answer.score), num_stuck

    def beams(self, width: int, max_tokens: int) -> list[Answer]:
        """What beam search finds by transformers' rules, `early_stopping=False`; scores are means."""
        running, found, next_logits = [(Tokens(), 0.0)], list[Answer](), NextLogits(self.model)
        for length in range(1, max_tokens + 1):
            ways_of_all = self.ways([tokens for tokens, _ in running], next_logits)
            ranked = [
                ((*tokens, token), total + logprob)
                for (tokens, total), ways in zip(running, ways_of_all, strict=True)
                for token, logprob in ways.items()
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
