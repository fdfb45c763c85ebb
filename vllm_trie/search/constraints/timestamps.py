"""Whisper's rules of timestamps: in pairs around text, never decreasing, and taken where they are likelier than text.

Source: transformers 5.19 `WhisperTimeStampLogitsProcessor`, which `generate(return_timestamps=True)` applies after the
suppression of tokens. In beam search it acts on log-probabilities: the others are not renormalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from vllm_trie.search.constraints.constraint import Constraint
from vllm_trie.search.devices import NEVER, search_arange

# What a hypothesis ends with: nothing, text, a timestamp that starts a segment, or one that ends a segment.
EMPTY, TEXT, START, END = KINDS = range(4)


@dataclass(frozen=True)
class TimestampConstraint(Constraint):
    """Hypotheses have timestamps as transformers' `generate(return_timestamps=True)` wants them.

    The states [G, r] int64 are `len(KINDS) * passed + kind`: `passed` is the index of the last timestamp, plus one, and
    `kind` what the hypothesis ends with. Timestamps count from `<|0.00|>` on, whose index is 0.

    Args:
        eos: The first special token: smaller ones are text.
        no_timestamps: `<|notimestamps|>`, the last special token: greater ones are timestamps.
        latest_first: The greatest index of the first timestamp; None: any.
        begins: The state of a hypothesis without tokens.
    """

    eos: int
    no_timestamps: int
    latest_first: int | None
    begins: int = EMPTY

    @classmethod
    def after(
        cls, prompt: Sequence[int], eos: int, no_timestamps: int, latest_first: int | None
    ) -> TimestampConstraint:
        """The rules after a prompt, whose tokens after the last special one count as the first of every hypothesis."""
        rules = cls(eos, no_timestamps, latest_first)
        special = (place for place, token in enumerate(prompt) if eos <= token <= no_timestamps)
        states = rules.begin(1, torch.device("cpu"))
        for token in prompt[max(special, default=-1) + 1 :]:
            states = rules.advance(states, torch.tensor([[token]]))
        return replace(rules, begins=int(states))

    def begin(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """See `Constraint`."""
        return torch.full((1, num_rows), self.begins, device=device)

    def advance(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        passed, kinds = tokens.long() - self.no_timestamps, states % len(KINDS)
        at_timestamp = len(KINDS) * passed + START + (kinds == TEXT)  # one after text is an end
        return torch.where(passed > 0, at_timestamp, states - kinds + TEXT)

    def leads_on(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See `Constraint`. `restrict` may leave out text that this allows: it knows the log-probabilities."""
        kinds, indices = states % len(KINDS), tokens - self.no_timestamps - 1
        may_be_text = (kinds != EMPTY) & ((kinds != END) | (tokens >= self.eos)) & (tokens != self.no_timestamps)
        return torch.where(indices >= 0, self._may_be(indices, states), may_be_text)

    def restrict(self, logprobs: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        logprobs, states, first = logprobs.clone(), states[..., None], self.no_timestamps + 1
        text, special, timestamps = logprobs[..., : self.eos], logprobs[..., self.eos : first], logprobs[..., first:]
        kinds, indices = states % len(KINDS), search_arange(timestamps.shape[-1], logprobs.device)
        special[..., -1] = NEVER
        timestamps.masked_fill_(~self._may_be(indices, states), NEVER)
        best_text = text.amax(dim=-1, keepdim=True).masked_fill(kinds == END, NEVER)
        best = torch.maximum(best_text, special.amax(dim=-1, keepdim=True))
        is_timestamp = (kinds == EMPTY) | (timestamps.logsumexp(dim=-1, keepdim=True) > best)
        text.masked_fill_(is_timestamp | (kinds == END), NEVER)
        special.masked_fill_(is_timestamp, NEVER)
        return logprobs

    def _may_be(self, indices: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Whether timestamps may come next, by their indices, of a shape that broadcasts to that of `states`."""
        passed, kinds = states // len(KINDS), states % len(KINDS)
        is_late = indices + (kinds == END) >= passed  # the next segment may start where one ends
        allowed = is_late & (kinds != START)
        return allowed if self.latest_first is None else allowed & ((kinds != EMPTY) | (indices <= self.latest_first))
