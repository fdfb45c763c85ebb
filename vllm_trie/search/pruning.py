"""Pruning: continuations too far behind the best are dropped before any may finish or live on."""

from __future__ import annotations

from math import inf, log
from typing import NamedTuple

import torch

from vllm_trie.search.warping import NEVER, best


class Pruning(NamedTuple):
    """Bounds on what a continuation may trail by, see `BeamParams`; the defaults drop nothing."""

    relative: float | None = None
    absolute: float | None = None
    relative_local: float | None = None
    per_parent: int | None = None

    @property
    def margin(self) -> float:
        """How far behind the best a continuation's score may be, in nats."""
        relative = inf if self.relative is None else -log(self.relative)
        return relative if self.absolute is None else min(relative, self.absolute)


def pruned(logprobs: torch.Tensor, scores: torch.Tensor, pruning: Pruning) -> torch.Tensor:
    """Log-probabilities with -inf for every continuation that pruning drops.

    With s the score of a continuation (its row's plus its own log-probability) and w its own
    log-probability alone, it is dropped if s < log(relative) + max s, if s < max s - absolute, if
    w < log(relative_local) + max w, or if `per_parent` continuations of its row are better; equal ones
    are kept by token, ascending. The maxima run over everything that live rows may take, before anything
    is dropped; each rule drops a row's worst, so their order does not matter. Both bounds together can
    drop everything: then the search is over. Source: Freitag and Al-Onaizan 2017, Beam Search Strategies
    for Neural Machine Translation, section 3; in the log domain.

    Args:
        logprobs: [G, r, V] float32, -inf where a row may not take a token.
        scores: [G, r] float32, of each row; -inf if it is dead.

    Returns:
        A new tensor, or `logprobs` itself if nothing prunes.
    """
    kept = logprobs
    if pruning.margin < inf:
        leader = (logprobs.amax(dim=-1) + scores).amax(dim=-1)[:, None, None]
        kept = kept.masked_fill(logprobs + scores[..., None] < leader - pruning.margin, NEVER)
    if pruning.relative_local is not None:
        leader = logprobs.amax(dim=-1).masked_fill(scores == NEVER, NEVER).amax(dim=-1)[:, None, None]
        kept = kept.masked_fill(logprobs < leader + log(pruning.relative_local), NEVER)
    if pruning.per_parent is not None and pruning.per_parent < logprobs.shape[-1]:
        last = logprobs.topk(pruning.per_parent, dim=-1).values[..., -1:]
        kept = kept.masked_fill(~best(logprobs, pruning.per_parent, last), NEVER)
    return kept
