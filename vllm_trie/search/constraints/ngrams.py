"""No repeated n-grams: forbids tokens that would complete an n-gram already in a row's history.

Source: transformers 5.19 `NoRepeatNGramLogitsProcessor`, which includes the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_trie.search.constraints.constraint import Constraint, ConstraintSource
from vllm_trie.search.devices import NEVER


@dataclass(frozen=True)
class NGramConstraint(Constraint):
    """No hypothesis has an n-gram of `size` tokens twice. The states are histories [G, r, L].

    Advancing keeps the length: a history begins with one `NOTHING` for each token to come.
    """

    size: int

    source = ConstraintSource.TOKENS

    def advance(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        return torch.cat([states[..., 1:], tokens[..., None].to(states.dtype)], dim=-1)

    def leads_on(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        last, repeats = self._repeating(states)
        return ~(repeats & (last == tokens[..., None])).any(dim=-1)

    def restrict(self, logprobs: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        last, repeats = self._repeating(states)
        if not last.shape[-1]:
            return logprobs
        bounds = torch.where(repeats, NEVER, -NEVER).to(logprobs.dtype)
        return logprobs.scatter_reduce(-1, last.clamp(min=0).long(), bounds, "amin")

    def _repeating(self, histories: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The last tokens of all n-grams of each history, and which of these n-grams the next token might repeat.

        Args:
            histories: [..., L] of any integer type, with `NOTHING` where there is no token.

        Returns:
            Tokens [..., L - n + 1], and bools, true where the n - 1 tokens before one are the history's newest.
        """
        num_ngrams = max(histories.shape[-1] - self.size + 1, 0)
        last = histories[..., self.size - 1 :]
        repeats = last >= 0
        for place in range(self.size - 1 if num_ngrams else 0):
            newest = histories[..., num_ngrams + place, None]
            repeats = repeats & (histories[..., place : place + num_ngrams] == newest) & (newest >= 0)
        return last, repeats
