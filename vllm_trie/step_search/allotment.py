"""Who gets the budget: how many candidates each beam gets in a round of a search by steps.

`allot_steps_by_score` is REBASE ("Inference Scaling Laws", arXiv 2408.00724, section 3.2), `steps_worth_their_kv` is
what ETS (arXiv 2502.13575) puts before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from vllm_trie.step_search.hypotheses import Path, StepHypothesis


def allot_steps_evenly(count: int, total: int) -> list[int]:
    """`total` dealt out over `count` beams, the first of them first."""
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
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(shares)), key=lambda rank: shares[rank] - exact[rank])
    for rank in by_remainder[: total - sum(shares)]:
        shares[rank] += 1
    return shares


def steps_worth_their_kv(beams: Sequence[StepHypothesis], shares: Sequence[int], price: float) -> list[StepHypothesis]:
    """ETS: the beams, at least one, with the most of the shares less `price` times their part of the KV.

    It maximises (sum of their shares) / (sum of all) - price * (tokens of distinct steps on their paths) / (the same
    of all beams). ETS gives this to a solver of integer programs. As a step costs once for all beams behind it, it
    pays if what pays behind it does, which decides it from the leaves up, exactly. The authors' code counts steps
    where the tries here know tokens; its third term, which rewards beams that differ in meaning, is left out, as it
    needs a model of sentences.

    Args:
        beams: None of which continues another.
        shares: That REBASE gives them.
    """
    paths = [beam.path for beam in beams]
    in_order = sorted(range(len(beams)), key=paths.__getitem__)  # what shares steps is together: one pass is enough
    shared = [_num_shared_steps(paths[one], paths[other]) for one, other in pairwise(in_order)]
    total_length = sum(sum(beams[i].step_lengths[n:]) for i, n in zip(in_order, (0, *shared), strict=True))
    total_share = sum(shares)
    parting = [_StepParting(0)]
    for i, num_shared_with_next in zip(in_order, (*shared, 0), strict=True):
        subtree, depth = _StepSubtree(i, shares[i] / total_share, [i]), len(paths[i])
        while True:  # up to where the next beam parts from this one
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
    """Beams that share a step, by their places among all."""

    first: int  # of all of them
    gain: float  # of those that pay, less what their steps cost
    beams: list[int]  # that pay


@dataclass
class _StepParting:
    """Where beams part: behind so many steps."""

    depth: int
    subtrees: list[_StepSubtree] = field(default_factory=list)

    def paying(self) -> _StepSubtree:
        """Those that lose nothing; if there are none, the one that loses least, of equal ones that of the best beam."""
        subtrees = sorted(self.subtrees)
        paying = [s for s in subtrees if s.gain >= 0] or [max(subtrees, key=lambda s: s.gain)]
        return _StepSubtree(subtrees[0].first, sum(s.gain for s in paying), [i for s in paying for i in s.beams])


def _num_shared_steps(one: Path, other: Path) -> int:
    """Steps that both begin with."""
    return next(depth for depth, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
