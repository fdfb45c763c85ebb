"""Grammars: the tokens that a row's grammar allows next, which the scheduler sends as one bit per token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_trie.search.constraints.constraint import Constraint, ConstraintSource
from vllm_trie.search.devices import NEVER, is_searched_on_host, search_arange


@dataclass(frozen=True)
class GrammarConstraint(Constraint):
    """Rows take only what their grammar allows. The states [G, r, V] are bools.

    Args:
        num_seen: None: log-probabilities are normalised over what the grammar allows. Else they are the model's
            own, and only this many of each row's best are considered, as in vLLM's `LLM.beam_search`.
    """

    num_seen: int | None = None

    source = ConstraintSource.MASKS

    def mask(self, logits: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        return logits if self.num_seen is not None else torch.where(states, logits, NEVER)

    def narrow(self, logprobs: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See `Constraint`: keeps what the grammar allows of a row's best `num_seen`, or else the best it allows.

        As in vLLM's `LLM.beam_search`, which sees no more of a row. (Where a grammar allows more than 1,024 tokens, but
        none of the best, vLLM drops the beam.) Source: vLLM 0.33 `_build_beam_sampling_params`, `_beam_search_step`.
        """
        if self.num_seen is None:
            return logprobs
        last = logprobs.topk(min(self.num_seen, logprobs.shape[-1]), dim=-1).values[..., -1:]
        kept = torch.where(states, logprobs, NEVER)
        return kept.masked_fill(kept < torch.minimum(last, kept.amax(dim=-1, keepdim=True)), NEVER)


def unpacked_constraint_mask(bits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Bools [..., V] from a mask [..., V / 32] int32 with one bit per token, the lowest first."""
    if is_searched_on_host(bits.device):  # numpy takes a fortieth of torch's time
        unpacked = np.unpackbits(bits.numpy().view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
        return torch.from_numpy(unpacked.view(bool))
    bit = 1 << search_arange(8, bits.device).byte()
    return (bits.view(torch.uint8)[..., None] & bit).ne(0).flatten(-2)[..., :vocab_size]
