"""Decides how many candidates each beam gets in a round of a search by steps.

`allot_steps_by_score` is REBASE ("Inference Scaling Laws", arXiv 2408.00724, section 3.2), `steps_worth_their_kv` is
the selection that ETS (arXiv 2502.13575) adds before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from vllm_trie.step_search.hypotheses import Path, StepHypothesis


def allot_steps_evenly(count: int, total: int) -> list[int]:
    """Share `total` evenly among `count` beams; the remainder goes to the first ones."""
    each, left = divmod(total, count)
    return [each + (rank < left) for rank in range(count)]


def allot_steps_by_score(scores: Sequence[float], total: int, temperature: float) -> list[int]:
    """REBASE: each beam's share of `total` is the softmax of its score / temperature.

    The paper rounds each share, so that the sum may differ from `total`; the authors' code rounds up, the best beam
    first, until nothing is left. Here shares are rounded by largest remainders, so that the sum is exactly `total`, and
    none is more than one off. Ties go to the earlier beam.

    Args:
        scores: Of the beams, best first.
    """
    best = max(scores)
    weights = [math.exp((score - best) / temperature) for score in scores]
    of_all = sum(weights)
    exact = [total * weight / of_all for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(shares)), key=lambda rank: shares[rank] - exact[rank])
    for rank in by_remainder[: total - sum(shares)]:
        shares[rank] += 1
    return shares


def steps_worth_their_kv(beams: Sequence[StepHypothesis], shares: Sequence[int], price: float) -> list[StepHypothesis]:
    """ETS: the set of beams, at least one, that maximizes their shares minus `price` times their part of the KV.

    It maximizes (sum of their shares) / (sum of all) - price * (tokens of distinct steps on their paths) / (the same
    for all beams). ETS uses a solver for integer programs. But a step costs once for all beams that continue it, so it
    pays if the paying beams after it cover its cost: this decides exactly, from the leaves up. The authors' code counts
    steps, this one tokens. ETS's third term, which rewards beams that differ in meaning, is left out, as it needs a
    sentence model.

    Args:
        beams: None of them continues another.
        shares: Their shares by REBASE.
    """
    paths = [beam.path for beam in beams]
    in_order = sorted(range(len(beams)), key=paths.__getitem__)  # common steps are adjacent: one pass suffices
    shared = [_num_shared_steps(paths[one], paths[other]) for one, other in pairwise(in_order)]
    total_length = sum(sum(beams[i].step_lengths[n:]) for i, n in zip(in_order, (0, *shared), strict=True))
    total_share = sum(shares)
    parting = [_StepParting(0)]
    for i, num_shared_with_next in zip(in_order, (*shared, 0), strict=True):
        subtree, depth = _StepSubtree(i, shares[i] / total_share, [i]), len(paths[i])
        while True:  # up to where the next beam branches off
            if parting[-1].depth < num_shared_with_next:
                parting.append(_StepParting(num_shared_with_next))
            cost = price * sum(beams[i].step_lengths[parting[-1].depth : depth]) / total_length
            parting[-1].subtrees.append(subtree._replace(gain=subtree.gain - cost))
            if parting[-1].depth == num_shared_with_next:
                break
            closed = parting.pop()
            subtree, depth = closed.paying(), closed.depth
    return [beams[i] for i in sorted(parting[0].paying().beams)]


class _StepSubtree(NamedTuple):
    """Beams that share a step, by index."""

    first: int  # the first of all its beams
    gain: float  # shares of the paying beams minus the cost of their steps
    beams: list[int]  # the paying ones


@dataclass
class _StepParting:
    """A point where beams branch, after `depth` steps."""

    depth: int
    subtrees: list[_StepSubtree] = field(default_factory=list)

    def paying(self) -> _StepSubtree:
        """The subtrees without a loss; if none, the one that loses least, with ties to that of the best beam."""
        subtrees = sorted(self.subtrees)
        paying = [s for s in subtrees if s.gain >= 0] or [max(subtrees, key=lambda s: s.gain)]
        return _StepSubtree(subtrees[0].first, sum(s.gain for s in paying), [i for s in paying for i in s.beams])


def _num_shared_steps(one: Path, other: Path) -> int:
    """The number of first steps that two paths share."""
    return next(depth for depth, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
