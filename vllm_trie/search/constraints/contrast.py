"""Contrastive decoding: hypotheses compete by how much more likely the model finds them than a weaker one, the amateur.

Sources: Li et al. 2022, Contrastive Decoding: Open-ended Text Generation as Optimization (arXiv 2210.15097), whose
beams compete by sums of log-probabilities of both models, not renormalised in their code; O'Brien and Lewis 2023,
Contrastive Decoding Improves Reasoning in Large Language Models (arXiv 2309.09117), for the weights. The latter weigh
logits of one sequence; logits of different beams have no common zero, so log-probabilities take their place.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log

import torch

from vllm_trie.search.constraints.constraint import Constraint, ConstraintSource
from vllm_trie.search.devices import NEVER


@dataclass(frozen=True)
class ContrastConstraint(Constraint):
    """A token scores (1 + beta) log p - beta log q, if p is at least alpha times the greatest p of its row.

    p is the model's probability of the token, after everything that changes or masks its logits; q is the amateur's.
    Other tokens are not plausible, and no beam takes them. The states [G, r, V] float32 are log q.

    Args:
        alpha: In (0, 1].
        beta: At least 0; at 0 nothing is contrasted.
    """

    alpha: float
    beta: float

    source = ConstraintSource.AMATEUR

    @property
    def most_boost(self) -> float:  # type: ignore[override]
        """See `Constraint`: unbounded, because the amateur's probability of a token may be arbitrarily small."""
        return inf if self.beta else 0.0

    def boosts(self, states: torch.Tensor, logprobs: torch.Tensor, is_end: bool) -> torch.Tensor:
        """See `Constraint`."""
        if not self.beta:
            return torch.zeros_like(logprobs)
        return torch.where(self._are_plausible(logprobs), self.beta * (logprobs - states), 0.0)

    def narrow(self, logprobs: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        return logprobs.where(self._are_plausible(logprobs), NEVER)

    def _are_plausible(self, logprobs: torch.Tensor) -> torch.Tensor:
        """[G, r, V] bool; true for the best token of each row."""
        return logprobs >= logprobs.amax(dim=-1, keepdim=True) + log(self.alpha)
