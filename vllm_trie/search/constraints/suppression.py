"""Tokens that a model's generation configuration suppresses: `suppress_tokens` and `begin_suppress_tokens`.

Source: transformers 5.19 `SuppressTokensLogitsProcessor` and `SuppressTokensAtBeginLogitsProcessor`, which in beam
search act on log-probabilities: the others are not renormalised.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_trie.search.constraints.constraint import Constraint
from vllm_trie.search.devices import NEVER, search_constant


@dataclass(frozen=True)
class SuppressionConstraint(Constraint):
    """No hypothesis takes a suppressed token. The states [G, r] bool are whether a hypothesis has any token yet.

    Args:
        anywhere: Tokens suppressed at every position.
        at_first: Tokens suppressed as the first of a hypothesis.
    """

    anywhere: tuple[int, ...]
    at_first: tuple[int, ...]

    def begin(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """See `Constraint`."""
        return torch.zeros((1, num_rows), dtype=torch.bool, device=device)

    def advance(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        return torch.ones_like(states)

    def leads_on(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        anywhere, at_first = (search_constant(ids, tokens.device) for ids in (self.anywhere, self.at_first))
        return ~(torch.isin(tokens, anywhere) | (torch.isin(tokens, at_first) & ~states))

    def restrict(self, logprobs: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        device = logprobs.device
        logprobs = logprobs.index_fill(-1, search_constant(self.anywhere, device), NEVER)
        at_first = search_constant(self.at_first, device)
        own = logprobs.index_select(-1, at_first).masked_fill_(~states[..., None], NEVER)
        return logprobs.index_copy_(-1, at_first, own)
