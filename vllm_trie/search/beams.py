"""What beams carry from step to step, and how it follows them when they fork.

Beyond this only their histories fork: tokens and KV blocks, in the engine's tables; see `vllm_trie.worker.rows.rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

import torch

from vllm_trie.search.constraints.constraint import Constraint, ConstraintSource
from vllm_trie.search.devices import NEVER, filled_for_search, search_arange

States = Mapping[Constraint, torch.Tensor]  # [G, r, ...] each
STATELESS: States = {}


class SearchBeams(NamedTuple):
    """What r rows of each of G groups carry, on the device.

    Args:
        scores: [G, r] float32, cumulative log-probability of each row, at most 0; -inf for a dead row.
        rank_scores: [G, r] float32, what hypotheses compete by if not by `scores`: with noise or boosts; None before
            the first step.
        states: The rows' states, by constraint.
        length: Tokens of every hypothesis, if the host knows that all are equally long.
    """

    scores: torch.Tensor
    rank_scores: torch.Tensor | None = None
    states: States = STATELESS
    length: int | None = None

    @property
    def compete_by(self) -> torch.Tensor:
        """[G, r] float32, the scores that rank the rows."""
        return self.scores if self.rank_scores is None else self.rank_scores

    @classmethod
    def join(cls, groups: Sequence[SearchBeams]) -> SearchBeams:
        """Concatenates the beams of groups, which are equally wide and have equal constraints."""
        if len(groups) == 1:
            return groups[0]
        rank_scores = [beams.rank_scores for beams in groups if beams.rank_scores is not None]
        states = {key: torch.cat([beams.states[key] for beams in groups]) for key in groups[0].states}
        scores = torch.cat([beams.scores for beams in groups])
        return cls(scores, torch.cat(rank_scores) if rank_scores else None, states)

    def at(self, place: int) -> SearchBeams:
        """The beams of one group."""
        if len(self.scores) == 1:
            return self
        return self._each(lambda of_groups: of_groups[place : place + 1])

    def rows(self, which: slice) -> SearchBeams:
        """The beams of some rows of each group."""
        return self._each(lambda of_rows: of_rows[:, which])

    def gather(self, parents: torch.Tensor) -> SearchBeams:
        """What the continuations of rows `parents` [G, k] carry."""
        return self._each(lambda of_rows: _gathered_in_search(of_rows, parents))

    def only(self, lives: torch.Tensor) -> SearchBeams:
        """These beams with only some rows alive: `lives` [G, r] bool."""
        never = filled_for_search((), NEVER, self.scores.device)
        rank_scores = None if self.rank_scores is None else self.rank_scores.where(lives, never)
        return self._replace(scores=self.scores.where(lives, never), rank_scores=rank_scores)

    def advance(self, tokens: torch.Tensor) -> SearchBeams:
        """These beams with the states of all constraints advanced by one token [G, r] each."""
        states = {key: key.advance(state, tokens) for key, state in self.states.items()}
        return self._replace(states=states, length=None)

    def after(self, going: NextSearchBeams) -> SearchBeams:
        """What the next beams carry, by slot, with states advanced where the step has not done so."""
        states = dict(going.beams.states)
        for key, state in self.states.items():
            if key.source is ConstraintSource.LAST_STEP and key not in states:
                states[key] = key.advance(_gathered_in_search(state, going.parents), going.tokens)
        return going.beams._replace(states=states)

    def lead_on(self, tokens: torch.Tensor) -> torch.Tensor:
        """[G, r] bool, whether all constraints allow a token [G, r] and something after it."""
        allowed = torch.ones_like(tokens, dtype=torch.bool)
        for key, state in self.states.items():
            allowed &= key.leads_on(state, tokens)
        return allowed

    @property
    def are_narrowed(self) -> bool:
        """Whether any constraint overrides `narrow`."""
        return bool(self.states) and any(type(key).narrow is not Constraint.narrow for key in self.states)

    @property
    def sparse(self) -> Constraint | None:
        """The constraint that lists the continuations of rows, if there is one."""
        for key in self.states:
            if key.is_sparse:
                return key
        return None

    def boosts(self, logprobs: torch.Tensor, is_end: bool) -> torch.Tensor | None:
        """See `Constraint.boosts`; the sum over all constraints."""
        boosts = list[torch.Tensor]()
        for key, state in self.states.items():
            if (boost := key.boosts(state, logprobs, is_end)) is not None:
                boosts.append(boost)
        return reduce(add, boosts) if boosts else None

    def pending(self, parents: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        """See `Constraint.pending`; for continuations [G, k] of these rows, the sum over all constraints."""
        found = [key.pending(state, parents, tokens) for key, state in self.states.items()]
        return reduce(add, shares) if (shares := [share for share in found if share is not None]) else None

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Constraint.mask`; returns `logits` itself if nothing is masked."""
        for key, state in self.states.items():
            logits = key.mask(logits, state)
        return logits

    def restrict(self, logprobs: torch.Tensor) -> torch.Tensor:
        """See `Constraint.restrict`."""
        for key, state in self.states.items():
            logprobs = key.restrict(logprobs, state)
        return logprobs

    def narrow(self, logprobs: torch.Tensor, done: Constraint | None = None) -> torch.Tensor:
        """See `Constraint.narrow`; `done` is the constraint whose listed continuations are all that is looked at."""
        for key, state in self.states.items():
            logprobs = logprobs if key is done else key.narrow(logprobs, state)
        return logprobs

    def _each(self, part: Callable[[torch.Tensor], torch.Tensor]) -> SearchBeams:
        """Applies `part` to every tensor."""
        rank_scores = None if self.rank_scores is None else part(self.rank_scores)
        states = {key: part(state) for key, state in self.states.items()}
        return SearchBeams(part(self.scores), rank_scores, states, self.length)


class NextSearchBeams(NamedTuple):
    """The beams that live on, by slot: tensors [G, b]."""

    parents: torch.Tensor  # the slot whose beam this slot continues
    tokens: torch.Tensor
    beams: SearchBeams  # what the beams carry; `states` only where the step already knows them


def gather_search_states(states: States, parents: torch.Tensor) -> States:
    """States [G, k, ...] of the continuations of rows `parents` [G, k]."""
    return {key: _gathered_in_search(state, parents) for key, state in states.items()}


def _gathered_in_search(of_rows: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """[G, k, ...], the entries of rows `parents` [G, k] from [G, r, ...].

    A single row is the prompt, and everything continues it: groups of beams count it as the first slot of each.
    """
    if of_rows.shape[1] == 1:
        return of_rows.expand(-1, parents.shape[1], *of_rows.shape[2:])
    return of_rows[search_arange(len(of_rows), of_rows.device)[:, None], parents.long()]
