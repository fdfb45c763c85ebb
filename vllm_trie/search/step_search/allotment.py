"""Who gets the budget: how many candidates each beam gets in a round of a search by steps.

`by_score` is REBASE ("Inference Scaling Laws", arXiv 2408.00724, section 3.2), `worth_their_kv` is what ETS (arXiv
2502.13575) puts before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm_trie.search.step_search.hypotheses import Path, StepHypothesis


def evenly(count: int, total: int) -> list[int]:
    """`total` dealt out over `count` beams, the first of them first."""
    each, left = divmod(total, count)
    return [each + (rank < left) for rank in range(count)]


def by_score(scores: Sequence[float], total: int, temperature: float) -> list[int]:
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


def worth_their_kv(beams: Sequence[StepHypothesis], shares: Sequence[int], price: float) -> list[StepHypothesis]:
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
    lengths = {b.path[:depth]: b.step_lengths[depth - 1] for b in beams for depth in range(1, len(b.path) + 1)}
    total_length, total_share = sum(lengths.values()), sum(shares)
    gains = {beam.path: share / total_share for beam, share in zip(beams, shares, strict=True)}
    children: dict[Path, list[Path]] = {}
    for path in lengths:
        children.setdefault(path[:-1], []).append(path)
    for path in sorted(lengths, key=len, reverse=True):
        if path in children:
            gains[path] = sum(gains[child] for child in _paying(children[path], gains))
        gains[path] -= price * lengths[path] / total_length
    kept = {path for siblings in children.values() for path in _paying(siblings, gains)}
    return [beam for beam in beams if all(beam.path[:depth] in kept for depth in range(1, len(beam.path) + 1))]


def _paying(siblings: Sequence[Path], gains: dict[Path, float]) -> list[Path]:
    """Those that lose nothing; if there are none, the one that loses least."""
    return [path for path in siblings if gains[path] >= 0] or [max(siblings, key=gains.__getitem__)]
