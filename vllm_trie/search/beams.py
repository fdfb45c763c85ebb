"""What rows carry from step to step, and how it follows their beams: nothing else forks with them but their histories.

Those, tokens and KV blocks, lie in the engine's own tables; see `vllm_trie.worker.reorder`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from vllm_trie.search.constraints.constraint import Constraint, Source
from vllm_trie.search.devices import numbers
from vllm_trie.search.step_result import Step

States = Mapping[Constraint, torch.Tensor]  # [G, r, ...] each


class Beams(NamedTuple):
    """What r rows of each of G groups carry; on the device.

    Args:
        scores: [G, r] float32, cumulative log-probability of each row, at most 0; -inf for a row that is dead.
        perturbed: [G, r] float32, these with the noise of stochastic beam search; None before its first step.
        states: By constraint under which they go.
        length: Tokens of all hypotheses, if the host knows that they are equally many.
    """

    scores: torch.Tensor
    perturbed: torch.Tensor | None = None
    states: States = MappingProxyType({})
    length: int | None = None

    @classmethod
    def join(cls, groups: Sequence[Beams]) -> Beams:
        """Those of all groups, which are equally wide and under equal constraints."""
        if len(groups) == 1:
            return groups[0]
        perturbed = [beams.perturbed for beams in groups if beams.perturbed is not None]
        states = {key: torch.cat([beams.states[key] for beams in groups]) for key in groups[0].states}
        return cls(torch.cat([beams.scores for beams in groups]), torch.cat(perturbed) if perturbed else None, states)

    def split(self) -> list[Beams]:
        """Those of each group."""
        count = len(self.scores)
        noisy = [None] * count if self.perturbed is None else self.perturbed.chunk(count)
        parts = zip(*(of_all.chunk(count) for of_all in self.states.values()), strict=True)
        states = [dict(zip(self.states, of_group, strict=True)) for of_group in parts] or [{}] * count
        return [*map(Beams, self.scores.chunk(count), noisy, states)]

    def gather(self, parents: torch.Tensor) -> Beams:
        """What rows carry that continue these: [G, k] which."""
        perturbed = None if self.perturbed is None else _gathered(self.perturbed, parents)
        return Beams(_gathered(self.scores, parents), perturbed, gather_states(self.states, parents), self.length)

    def advance(self, tokens: torch.Tensor) -> Beams:
        """The same after one more token [G, r] each, as far as constraints go."""
        states = {key: key.advance(of_all, tokens) for key, of_all in self.states.items()}
        return Beams(self.scores, self.perturbed, states)

    def after(self, step: Step[torch.Tensor]) -> Beams:
        """What the next beams carry, by slot."""
        states = dict(step.states or {})
        for key, of_all in self.states.items():
            if key.source is Source.LAST_STEP and key not in states:
                states[key] = key.advance(_gathered(of_all, step.parents), step.tokens)
        return Beams(step.scores, None if step.perturbed is None else step.perturbed.beams, states)

    def lead_on(self, tokens: torch.Tensor) -> torch.Tensor:
        """[G, r] bool, whether all constraints allow a token [G, r], and something after it."""
        allowed = torch.ones_like(tokens, dtype=torch.bool)
        for key, of_all in self.states.items():
            allowed &= key.leads_on(of_all, tokens)
        return allowed

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Constraint.mask`; `logits` themselves if nothing is masked."""
        for key, of_all in self.states.items():
            logits = key.mask(logits, of_all)
        return logits

    def restrict(self, logprobs: torch.Tensor) -> torch.Tensor:
        """See `Constraint.restrict`."""
        for key, of_all in self.states.items():
            logprobs = key.restrict(logprobs, of_all)
        return logprobs

    def narrow(self, logprobs: torch.Tensor, done: Constraint | None = None) -> torch.Tensor:
        """See `Constraint.narrow`; `done` is that of which only what it allows is looked at anyhow."""
        for key, of_all in self.states.items():
            logprobs = logprobs if key is done else key.narrow(logprobs, of_all)
        return logprobs


def gather_states(states: States, parents: torch.Tensor) -> States:
    """[G, k, ...] of rows that continue these [G, k]."""
    return {key: _gathered(of_all, parents) for key, of_all in states.items()}


def _gathered(of_rows: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """[G, k, ...] of [G, r, ...]."""
    return of_rows[numbers(len(of_rows), of_rows.device)[:, None], parents.long()]
