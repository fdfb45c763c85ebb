"""Temperature and filters: what vLLM's sampler makes of a row's logits before it draws."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import NamedTuple

import torch

NEVER = float("-inf")


class Warping(NamedTuple):
    """Fields of `SamplingParams` of the same names; the defaults do nothing."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0

    @property
    def filters(self) -> bool:
        """Whether some tokens may not be taken."""
        return self._replace(temperature=1.0) != Warping()


def log_probabilities(
    logits: torch.Tensor, masked_token_ids: Sequence[int] = (), temperature: float = 1.0
) -> torch.Tensor:
    """Log-softmax of logits [..., V] in float32, and then the mask, which does not renormalise, as in transformers."""
    if temperature != 1.0:
        logits = logits.float() / temperature
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    if masked_token_ids:
        logprobs[..., list(masked_token_ids)] = NEVER
    return logprobs


def filtered(logprobs: torch.Tensor, warping: Warping) -> torch.Tensor:
    """Log-probabilities [..., V] with -inf for what `min_p`, `top_k` and `top_p`, in this order, leave out.

    What remains is not renormalised: a filter removes continuations, it does not reward the others.
    `top_k` keeps all that tie for its last place; `top_p` keeps the lower tokens of those that tie.
    Source: vLLM 0.32 `MinPLogitsProcessor` and `apply_top_k_top_p`.

    Returns:
        A new tensor, or `logprobs` itself if nothing filters.
    """
    if warping.min_p > 0:
        threshold = logprobs.amax(dim=-1, keepdim=True) + log(warping.min_p)
        logprobs = logprobs.masked_fill(logprobs < threshold, NEVER)
    if 0 < warping.top_k < logprobs.shape[-1]:
        last = logprobs.topk(warping.top_k, dim=-1).values[..., -1:]
        logprobs = logprobs.masked_fill(logprobs < last, NEVER)
    if warping.top_p < 1:
        best_first, tokens = logprobs.sort(dim=-1, descending=True, stable=True)
        behind = best_first.softmax(dim=-1).cumsum(dim=-1) >= warping.top_p  # what follows such a token is left out
        best_first[..., 1:].masked_fill_(behind[..., :-1], NEVER)
        logprobs = best_first.scatter(-1, tokens, best_first)
    return logprobs
