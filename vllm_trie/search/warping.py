"""Temperature and filters: what vLLM's sampler makes of a row's logits before it draws."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import log
from typing import NamedTuple

import torch

from vllm_trie.search.shortcuts import sees

NEVER = float("-inf")
FIRST_RANKED = 64  # most distributions hold most of their mass in fewer tokens


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
        logprobs.index_fill_(-1, tensor_of(tuple(masked_token_ids), logprobs.device), NEVER)
    return logprobs


@lru_cache
def tensor_of(token_ids: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[S] int64, uploaded once."""
    return torch.tensor(token_ids, dtype=torch.int64, device=device)


def filtered(logprobs: torch.Tensor, warping: Warping, most: int | None = None) -> torch.Tensor:
    """Log-probabilities [..., V] with -inf for what `min_p`, `top_k` and `top_p`, in this order, leave out.

    What remains is not renormalised: a filter removes continuations, it does not reward the others.
    `top_k` keeps all that tie for its last place; `top_p` keeps the lower tokens of those that tie.
    Source: vLLM 0.32 `MinPLogitsProcessor` and `apply_top_k_top_p`.

    Args:
        most: So many of the best of each row matter, and others may be left out anyway; None: all.

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
        logprobs = _nucleus(logprobs, warping.top_p, min(most or logprobs.shape[-1], logprobs.shape[-1]))
    return logprobs


def best(logprobs: torch.Tensor, count: torch.Tensor | int, last: torch.Tensor) -> torch.Tensor:
    """Which are the best `count` of each row, ties by token: bools [..., V].

    Args:
        count: [..., 1], or the same for all rows.
        last: [..., 1], the least of them.
    """
    above, ties = logprobs > last, logprobs == last
    return above | (ties & (ties.cumsum(dim=-1) <= count - above.sum(dim=-1, keepdim=True)))


def running_sum(values: torch.Tensor) -> torch.Tensor:
    """Sums along [..., N], the same whenever and wherever they are computed.

    On CUDA torch scans a single row by a kernel whose float sums depend on what else the device does, which tensor
    parallel ranks must not; of several rows it scans each by itself. Source: torch 2.13 `scan_dim`.
    """
    if values.numel() != values.shape[-1]:
        return values.cumsum(dim=-1)
    return torch.stack([values, values]).cumsum(dim=-1)[0]


def _nucleus(logprobs: torch.Tensor, top_p: float, most: int) -> torch.Tensor:
    """The fewest best of each row that hold `top_p` of its mass, or the `most` best if these are fewer."""
    total = logprobs.logsumexp(dim=-1, keepdim=True)
    may_look = sees(logprobs.device)
    num_ranked = min(FIRST_RANKED, most) if may_look else most
    while True:
        best_first = logprobs.topk(num_ranked, dim=-1).values
        held = running_sum((best_first - total).exp().nan_to_num())
        if num_ranked == most or ((held[..., -1:] >= top_p) | (total == NEVER)).all():
            break
        num_ranked = min(4 * num_ranked, most)
    count = (1 + (held < top_p).sum(dim=-1, keepdim=True)).clamp_(max=num_ranked)
    return logprobs.masked_fill(~best(logprobs, count, best_first.gather(-1, count - 1)), NEVER)
