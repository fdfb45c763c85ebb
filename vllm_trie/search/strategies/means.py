"""What all strategies have in common: what they need besides logits and beams, and which candidates go on or end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.search.devices import NEVER
from vllm_trie.search.rank import Candidates, Completes
from vllm_trie.search.rules import SelectRules
from vllm_trie.search.slots import select_next
from vllm_trie.search.step_result import Step

# Where each beam samples, [G, b] float64 in [0, 1); where beams are drawn together, by group what draws.
Random = torch.Tensor | Sequence[np.random.Generator]


class Means(NamedTuple):
    """What a step is taken with."""

    random: Random | None = None  # where something is drawn
    completes: Completes | None = None  # tells of candidates on the host which complete a stop string
    select_next: Callable[..., Candidates[torch.Tensor]] = select_next  # of `slots`, or what does the same here


class Choice(NamedTuple):
    """What a strategy has chosen."""

    step: Step[torch.Tensor]
    reported: torch.Tensor  # [G, r, V] the log-probabilities of which some are reported


def alive(candidates: Candidates[torch.Tensor], stops: torch.Tensor) -> torch.Tensor:
    """Which candidates [G, K] go on, unless there are better ones."""
    return (candidates.scores > NEVER) > stops  # that is, and not


def going_on(rules: SelectRules, candidates: Candidates[torch.Tensor], stops: torch.Tensor) -> torch.Tensor:
    """The candidates that may become beams."""
    lives = alive(candidates, stops)
    return lives if rules.num_beams is None else lives & (lives.cumsum(dim=1) <= rules.num_beams)


def ended(
    rules: SelectRules, candidates: Candidates[torch.Tensor], stops: torch.Tensor, may_end: torch.Tensor | None = None
) -> Candidates[torch.Tensor]:
    """The candidates that stop, or in the last step all, where they may; the others with a score of -inf."""
    ends = torch.ones_like(stops) if rules.is_last else stops
    ends = ends if may_end is None else ends & may_end
    return candidates._replace(scores=candidates.scores.where(ends, NEVER))


def by_row(tokens: torch.Tensor, scores: torch.Tensor) -> Candidates[torch.Tensor]:
    """Continuations [G, r, k] of r rows."""
    parents = torch.arange(tokens.shape[1], device=tokens.device)[:, None].expand_as(tokens)
    return Candidates(parents.flatten(1), tokens.flatten(1), scores.flatten(1))
