"""The exact distribution of what `accept_drafts` returns: each draft, decision and draw in a branch of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest.mock import patch

import numpy as np
import torch

from vllm_trie.speculation.search import rejection
from vllm_trie.speculation.search.rejection import AcceptedLayer, accept_drafts

Draw = Callable[["Branches", torch.Tensor, int, bool], np.ndarray]


class Chance:
    """A number in [0, 1): below a bound in one branch, not below it in another."""

    def __init__(self, branches: Branches) -> None:
        self.branches = branches

    def __lt__(self, bound: float) -> bool:
        is_below = self.branches.take([1 - min(bound, 1.0), min(bound, 1.0)]) == 1
        self.branches.num_beams += is_below
        return is_below


class Branches:
    """Stands in for the generator: one way through all choices. The ways it meets and leaves are in `others`."""

    def __init__(self, path: list[int], width: int) -> None:
        self.path, self.width = path, width
        self.others: list[list[int]] = []
        self.depth = self.num_beams = 0
        self.probability = 1.0
        self.first_distribution: torch.Tensor | None = None
        self.last: np.ndarray | None = None  # the distribution of the last cell, for which the result has a 0

    def random(self) -> Chance:
        return Chance(self)

    def take(self, chances: list[float]) -> int:
        if self.depth == len(self.path):
            possible = [choice for choice, chance in enumerate(chances) if chance > 0]
            self.others += [[*self.path, choice] for choice in possible[1:]]
            self.path = [*self.path, possible[0]]
        choice = self.path[self.depth]
        self.depth += 1
        self.probability *= chances[choice]
        return choice

    def drafts(self, q: torch.Tensor, count: int, replacement: bool) -> np.ndarray:
        distribution, cells = q.flatten().tolist(), []
        for _ in range(count):
            cells.append(self.take([mass / sum(distribution) for mass in distribution]))
            distribution[cells[-1]] *= replacement
        return np.array(cells)


def draw(rng: Branches, p: torch.Tensor, count: int, _replacement: bool) -> np.ndarray:
    """In place of `sample_search_cells`, for one cell at most. Of the last, which is not branched on, `p` is kept."""
    if not count:
        return np.zeros(0, dtype=np.int64)
    distribution = (p.flatten() / p.sum()).numpy()
    rng.num_beams += 1
    if rng.num_beams < rng.width:
        return np.array([rng.take(distribution.tolist())])
    rng.last = distribution
    return np.zeros(1, dtype=np.int64)


def branches(
    run: Callable[[Branches], AcceptedLayer], width: int, draw: Draw = draw
) -> Iterator[tuple[Branches, AcceptedLayer]]:
    """Every way through `run`, and what it returns."""
    paths: list[list[int]] = [[]]
    with patch.object(
        rejection, "sample_search_cells", lambda p, count, replacement, rng: draw(rng, p, count, replacement)
    ):
        while paths:
            rng = Branches(paths.pop(), width)
            verified = run(rng)
            yield rng, verified
            paths += rng.others


def pair_distribution(
    p: torch.Tensor,
    q: torch.Tensor,
    num_drafts: int,
    replacement: bool,
    *,
    sampled_with_replacement: bool | None = None,
    arranged: Callable[[np.ndarray], np.ndarray] = lambda drafts: drafts,
    tested: torch.Tensor | None = None,
    draw: Draw = draw,
) -> np.ndarray:
    """[N, N], the distribution of the two cells that `accept_drafts` makes of drafts from q; options do it wrong."""
    sampled = replacement if sampled_with_replacement is None else sampled_with_replacement
    tested = q if tested is None else tested
    distribution = np.zeros((p.numel(), p.numel()))

    def run(rng: Branches) -> AcceptedLayer:
        return accept_drafts(p, tested, arranged(rng.drafts(q, num_drafts, sampled)), 2, replacement, rng)

    for rng, verified in branches(run, 2, draw):
        first, second = verified.cells
        if rng.last is None:
            distribution[first, second] += rng.probability
        else:
            distribution[first] += rng.probability * rng.last
    return distribution


def random_pair(seed: int, shape: tuple[int, int], closeness: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """A target's and a draft model's distribution."""
    rng = np.random.default_rng(seed)
    p, other = rng.dirichlet(np.full(shape[0] * shape[1], 0.7), size=2)
    q = closeness * p + (1 - closeness) * other
    return torch.from_numpy(p).view(shape), torch.from_numpy(q / q.sum()).view(shape)


def rejected_parent(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A pair where the second of three beams was drafted and then rejected."""
    p, q = random_pair(seed, (3, 3))
    p[1] = 0
    return p / p.sum(), q


def sampled_pair_distribution(p: torch.Tensor, replacement: bool) -> np.ndarray:
    """[N, N], the distribution of two draws from p."""
    p = p.flatten().numpy()
    if replacement:
        return np.outer(p, p)
    rest = np.outer(p, p) * (1 - np.eye(len(p)))
    return rest / (1 - p)[:, None]


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Total variation."""
    return float(np.abs(a - b).sum()) / 2
