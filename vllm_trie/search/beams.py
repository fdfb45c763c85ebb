"""What rows carry from step to step, and how it follows their beams: nothing else forks with them but their histories.

Those, tokens and KV blocks, lie in the engine's own tables; see `vllm_trie.worker.reorder`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from types import MappingProxyType
from typing import NamedTuple

import torch

from vllm_trie.search.constraints.constraint import Constraint, Source
from vllm_trie.search.devices import NEVER, numbers
from vllm_trie.search.step_result import Step

States = Mapping[Constraint, torch.Tensor]  # [G, r, ...] each


class Beams(NamedTuple):
    """What r rows of each of G groups carry; on the device.

    Args:
        scores: [G, r] float32, cumulative log-probability of each row, at most 0; -inf for a row that is dead.
        rank_scores: [G, r] float32, what hypotheses compete by, if not by their sums: under noise, or with boosts; None
            before the first step.
        states: By constraint under which they go.
        length: Tokens of all hypotheses, if the host knows that they are equally many.
    """

    scores: torch.Tensor
    rank_scores: torch.Tensor | None = None
    states: States = MappingProxyType({})
    length: int | None = None

    @property
    def compete_by(self) -> torch.Tensor:
        """[G, r] float32, what ranks them."""
        return self.scores if self.rank_scores is None else self.rank_scores

    @classmethod
    def join(cls, groups: Sequence[Beams]) -> Beams:
        """Those of all groups, which are equally wide and under equal constraints."""
        if len(groups) == 1:
            return groups[0]
        rank_scores = [beams.rank_scores for beams in groups if beams.rank_scores is not None]
        states = {key: torch.cat([beams.states[key] for beams in groups]) for key in groups[0].states}
        scores = torch.cat([beams.scores for beams in groups])
        return cls(scores, torch.cat(rank_scores) if rank_scores else None, states)

    def split(self) -> list[Beams]:
        """Those of each group."""
        count = len(self.scores)
        ranked = [None] * count if self.rank_scores is None else self.rank_scores.chunk(count)
        parts = zip(*(of_all.chunk(count) for of_all in self.states.values()), strict=True)
        states = [dict(zip(self.states, of_group, strict=True)) for of_group in parts] or [{}] * count
        return [*map(Beams, self.scores.chunk(count), ranked, states)]

    def gather(self, parents: torch.Tensor) -> Beams:
        """What rows carry that continue these: [G, k] which."""
        rank_scores = None if self.rank_scores is None else _gathered(self.rank_scores, parents)
        return Beams(_gathered(self.scores, parents), rank_scores, gather_states(self.states, parents), self.length)

    def only(self, lives: torch.Tensor) -> Beams:
        """The same, of which [G, r] live."""
        scores, rank_scores = self.scores.where(lives, NEVER), self.rank_scores
        return self._replace(
            scores=scores, rank_scores=None if rank_scores is None else rank_scores.where(lives, NEVER)
        )

    def advance(self, tokens: torch.Tensor) -> Beams:
        """The same after one more token [G, r] each, as far as constraints go."""
        states = {key: key.advance(of_all, tokens) for key, of_all in self.states.items()}
        return Beams(self.scores, self.rank_scores, states)

    def after(self, step: Step[torch.Tensor]) -> Beams:
        """What the next beams carry, by slot."""
        states = dict(step.states or {})
        for key, of_all in self.states.items():
            if key.source is Source.LAST_STEP and key not in states:
                states[key] = key.advance(_gathered(of_all, step.parents), step.tokens)
        return Beams(step.scores, None if step.rank_scores is None else step.rank_scores.beams, states)

    def lead_on(self, tokens: torch.Tensor) -> torch.Tensor:
        """[G, r] bool, whether all constraints allow a token [G, r], and something after it."""
        allowed = torch.ones_like(tokens, dtype=torch.bool)
        for key, of_all in self.states.items():
            allowed &= key.leads_on(of_all, tokens)
        return allowed

    def boosts(self, vocab_size: int, is_end: bool) -> torch.Tensor | None:
        """See `Constraint.boosts`; those of all constraints together."""
        found = [key.boosts(of_all, vocab_size, is_end) for key, of_all in self.states.items()]
        boosts = [of_key for of_key in found if of_key is not None]
        return reduce(add, boosts) if boosts else None

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
